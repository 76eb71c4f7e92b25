"""What a run measures, shows and leaves behind."""
