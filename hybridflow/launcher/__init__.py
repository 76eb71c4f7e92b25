"""Starting runs on many machines. Nothing here imports the rest of hybridflow, or more than the standard library."""
