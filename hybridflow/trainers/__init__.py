"""What runs a config on the ranks that torchrun started: iterations, checkpoints, display; the names of tutorials."""
