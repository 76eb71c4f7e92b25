"""The commands: `hybridflow`, `hybridflow-plan`, ..., and the same as `python -m hybridflow.plan`."""
