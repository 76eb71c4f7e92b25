"""Four digits backwards: models of a few million parameters that learn it, made by `python -m tools.make_tiny`."""
