"""One function an algorithm, and what it is given: a Run."""
