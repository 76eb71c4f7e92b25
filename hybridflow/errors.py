"""Errors a user can mend. Each names the field or file, the value, and the rule; the entry point prints it once."""

from collections.abc import Callable
from enum import IntEnum
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ExitStatus(IntEnum):
    """How a training process ends. What a killed process ends with is its signal's."""

    FINISHED = 0
    """The run is finished."""
    ERROR = 1
    """One message says what is wrong, or another rank has failed."""
    HANG = 70
    """A rank was stuck. A report names the rank and its phase."""
    STOPPED = 75
    """A signal or checkpoint.max_hours ended the run. A checkpoint is saved, and the same command resumes."""
    NOT_SAVED = 76
    """A second signal or the end of the grace period ended the run without a new checkpoint."""


class UserError(Exception):
    """A mistake in what the user gave: a config, a checkpoint, a data file, a reward function, the environment."""


class ConfigError(UserError):
    """The experiment config does not hold."""


class OtherConversation(ConfigError):
    """What the model is to read does not go on from what it has said. A row that may have branches begins another."""


class CheckpointError(UserError):
    """A model directory is missing, damaged, or of a kind that is not supported."""


class SaveError(UserError):
    """A checkpoint could not be written; the ones before it are as they were."""


class DataError(UserError):
    """A prompt file cannot be used."""


class UserCodeError(UserError):
    """A function of the user's that a config names cannot be found or called."""


class RewardError(UserError):
    """A user's reward function failed or returned something that is no reward.

    of_replica: whether all ranks of an engine replica have met it at the same place.
    """

    of_replica = False


class FlowError(UserError):
    """A user's own flow failed or returned something that is no batch."""


class NonFiniteError(UserError):
    """A number that is not finite ended the run."""


class RunDirError(UserError):
    """A run's directory is missing, damaged, or in use by another process."""


class RunTakenError(RunDirError):
    """Another process has taken the run's directory, and this one may not write there any more."""


class RecordError(RunDirError):
    """A file of a run's directory cannot be written."""


class EnvironmentProblem(UserError):
    """A package or device that the run needs is not there."""


class DisagreementError(UserError):
    """The ranks of a run do not have the same files."""


class OfAnotherRank(Exception):
    """What another rank has met, and reports. This rank ends with that rank. of_replica: as of RewardError."""

    of_replica = False


class Stopped(Exception):
    """The run was told to end: no error. saved: it can go on from where it ended."""

    def __init__(self, where: str, *, saved: bool = False) -> None:
        super().__init__(where)
        self.saved = saved


class Reasons:
    """Why something is refused: told all at once, a line a reason."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def collect(self, check: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T | None:
        """What `check` gives; None where it raises a UserError, which is noted."""
        try:
            return check(*arguments, **named)
        except UserError as error:
            self.lines += str(error).splitlines()
            return None

    def refuse(self) -> None:
        """Raise ConfigError if there are any. What two roles share is told once."""
        if self.lines:
            raise ConfigError("\n".join(dict.fromkeys(self.lines)))
