"""Tasks, models and runs that are small enough for a CPU."""
