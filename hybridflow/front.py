"""The former path of `hybridflow.trainers.tutorial_names`, for code that was written for it."""

import sys

from hybridflow.trainers import tutorial_names

sys.modules[__name__] = tutorial_names
