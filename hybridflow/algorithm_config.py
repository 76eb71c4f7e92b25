"""The former path of `hybridflow.config.algorithms`, for code that was written for it."""

from hybridflow.config.algorithms import *  # noqa: F403
from hybridflow.config.losses import *  # noqa: F403
