"""Former paths of configs on fixed data, for code that was written for these."""

from hybridflow.config.fixed_data import FixedDataConfig as FixedDataConfig
from hybridflow.config.fixed_data import FixedDataSection as FixedDataSection
from hybridflow.config.kinds import AnyConfig as AnyConfig
from hybridflow.config.kinds import config_class as config_class
from hybridflow.config.kinds import load_config as load_config
