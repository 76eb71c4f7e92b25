"""Command line tools that stand beside the hybridflow package and are not imported by it."""
