"""Weights out of a run."""
