"""The score of a response: a user's functions, reward models, and what training makes of both."""

from hybridflow.rewards.functions import exact_match  # configs name it hybridflow.rewards:exact_match

__all__ = ["exact_match"]
