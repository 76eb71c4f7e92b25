class DelayedScaling:
    """Of 8-bit training, which nobody asks for here."""
