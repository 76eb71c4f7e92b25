"""From training shards to the engine's layouts, in the memory that training uses."""
