"""The former path of `hybridflow.trainers.fixed_data`, for code that was written for it."""

import sys

from hybridflow.trainers import fixed_data

sys.modules[__name__] = fixed_data
