"""The score of a response: a user's functions, reward models, and what training makes of both.

Configs name the shipped functions from here: `hybridflow.rewards:exact_match`. Importing this loads no torch.
"""

from hybridflow.rewards.code import passes_tests
from hybridflow.rewards.functions import exact_match
from hybridflow.rewards.gym import reasoning_gym
from hybridflow.rewards.mathematics import math_equal
from hybridflow.rewards.numeric import numeric_match
from hybridflow.rewards.texts import length_penalty, matches, opening_of

__all__ = [
    "exact_match",
    "length_penalty",
    "matches",
    "math_equal",
    "numeric_match",
    "opening_of",
    "passes_tests",
    "reasoning_gym",
]
