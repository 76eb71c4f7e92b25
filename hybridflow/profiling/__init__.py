"""Measures a device profile where it runs: what `hybridflow.planning.timing` needs to know of a machine."""
