"""What tests know of the taskset, whose module needs verifiers."""

NUM_TASKS = 16
