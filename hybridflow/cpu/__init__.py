"""What exists because a CPU is slow. Each part is opened by one module of the room that it serves, at start."""
