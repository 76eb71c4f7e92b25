"""The mathematics of policy optimisation: pure functions, no communication, no configuration."""
