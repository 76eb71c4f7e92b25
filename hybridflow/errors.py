"""Errors a user can mend. Each names the field or file, the value, and the rule; the entry point prints it once."""


class UserError(Exception):
    """A mistake in what the user gave: a config, a checkpoint, a data file, a reward function, the environment."""


class ConfigError(UserError):
    """The experiment config does not hold."""


class CheckpointError(UserError):
    """A model directory is missing, damaged, or of a kind that is not supported."""


class DataError(UserError):
    """A prompt file cannot be used."""


class UserCodeError(UserError):
    """A function of the user's that a config names cannot be found or called."""


class RewardError(UserError):
    """A user's reward function failed or returned something that is no reward."""


class EnvironmentProblem(UserError):
    """A package or device that the run needs is not there."""


class DisagreementError(UserError):
    """The ranks of a run do not have the same files."""
