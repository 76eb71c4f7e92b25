"""Prompts and everything else a run reads besides weights."""
