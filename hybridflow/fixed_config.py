"""The former path of `hybridflow.config.fixed_data`, for code that was written for it."""

import sys

from hybridflow.config import fixed_data

sys.modules[__name__] = fixed_data
