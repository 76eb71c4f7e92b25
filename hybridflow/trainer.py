"""The former path of `hybridflow.trainers.online`, for code that was written for it."""

from hybridflow.trainers.online import *  # noqa: F403
from hybridflow.trainers.online import OnlineTrainer as RLTrainer  # noqa: F401
