"""Starting runs on many machines. Nothing here imports hybridflow, or anything beyond the standard library."""
