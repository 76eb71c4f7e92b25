"""Sums of two numbers of two digits: a task that a published model of 135 M parameters learns on two CPU cores."""
