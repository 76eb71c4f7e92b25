"""Measures a device profile where it runs: what `hybridflow.automap.timing` needs to know of a machine."""
