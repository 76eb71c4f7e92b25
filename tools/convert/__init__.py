"""The command `python -m tools.convert`; its code is `hybridflow.convert`."""
