"""What a person sees of runs that are over or under way: one page, made from their directories."""
