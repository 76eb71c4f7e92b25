"""The former path of `hybridflow.trainers.online`, for code that was written for it."""

import sys

from hybridflow.trainers import online

sys.modules[__name__] = online
