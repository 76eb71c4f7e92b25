"""Published data sets into files that runs here read, where naming their columns is not enough."""
