"""Errors a user can mend. Each names the field or file, the value, and the rule; the entry point prints it once."""

from collections.abc import Callable, Iterable, Mapping
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


# ------------------------------------------------------------------------------------------------ what mends it


def typed(value: object) -> str:
    """As a person types it behind `key=`."""
    if isinstance(value, tuple | list):
        return f"[{','.join(map(typed, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def remedy(settings: Mapping[str, Iterable[object]], otherwise: str = "", *, place: str = "") -> str:
    """`. Set a=1, 2 or 4, or b=null`: keys and values of which each mends a refusal; empty without any.
    A key without values is left out.

    otherwise: what mends it too, `take 4 ranks`. place: of the section that has the keys; a key of "" is the place.
    """
    found = list[str]()
    for key, values in settings.items():
        if not (texts := list(dict.fromkeys(map(typed, values)))):
            continue
        *others, last = texts
        said = f"{', '.join(others)} or {last}" if others else last
        found.append(f"{'Set ' * (not found)}{'.'.join(part for part in (place, key) if part)}={said}")
    ways = ", or ".join([*found, *([otherwise] if otherwise else [])])
    return f". {ways[0].upper()}{ways[1:]}" if ways else ""


def divisors(count: int) -> list[int]:
    """Ascending, the number itself among them."""
    return [size for size in range(1, count + 1) if count % size == 0]


def around(given: int, fitting: Iterable[int]) -> list[int]:
    """The largest of these below `given`, and the smallest above; fewer where there are none."""
    every = sorted(fitting)
    below, above = [each for each in every if each < given], [each for each in every if each > given]
    return below[-1:] + above[:1]


class Mendable(ValueError):
    """A refusal of a section of a config. settings: see `remedy`, by keys of the section."""

    def __init__(self, why: str, settings: Mapping[str, Iterable[object]]) -> None:
        super().__init__(f"{why}{remedy(settings)}")
        self.why, self.settings = why, settings

    def within(self, place: str) -> "Mendable":
        """Of the section that has this one at `place`."""
        return Mendable(f"{place}.{self.why}", {f"{place}.{key}": values for key, values in self.settings.items()})

    def at(self, place: str) -> str:
        """The text, for a section at this place of the config."""
        return f"{self.why}{remedy(self.settings, place=place)}"
