"""What a config means on so many ranks, before anything starts: places, memory, hand-off."""
