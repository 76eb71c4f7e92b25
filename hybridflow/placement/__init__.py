"""What a config means on so many ranks, before anything starts: grids, memory, hosts, refusals."""
