"""Process groups, devices, and the few exchanges that make sharded results whole."""
