"""How long an iteration takes by layout, and the search for the best: what `auto` and `hybridflow.plan --time` ask."""
