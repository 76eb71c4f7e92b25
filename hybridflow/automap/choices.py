"""What a search finds: a choice of an option for each role on a placement, and the fastest that are known. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from hybridflow.automap.engine_options import EngineOption
from hybridflow.automap.options import RoleOption
from hybridflow.automap.placements import Placement
from hybridflow.config.auto import ENGINE

SIZED = ("actor", ENGINE, "critic", "reward_model")  # of which other sizes make another choice
Key = tuple[object, ...]


@dataclass(frozen=True)
class Choice:
    """An option for every role, on a placement. seconds: the bound. bytes: no less than of the fullest rank."""

    placement: Placement
    roles: Mapping[str, RoleOption]
    engine: EngineOption | None  # None: of a run on fixed data
    seconds: float
    bytes: int

    @property
    def key(self) -> Key:
        engine = {} if self.engine is None else {ENGINE: self.engine}
        return key_of(self.placement, {**self.roles, **engine})


def key_of(placement: Placement, chosen: Mapping[str, RoleOption | EngineOption]) -> Key:
    """In what two choices have to differ to count as two: where roles lie, and the sizes of the largest of them."""
    return (*placement.values(), *(chosen[name].sizes for name in SIZED if name in chosen))


class Best:
    """The `most` fastest choices that are known, each of another key. first: the first that is found will do."""

    def __init__(self, most: int, *, first: bool = False) -> None:
        self.most, self._first = most, first
        self._found: dict[Key, Choice] = {}
        self.limit = float("inf")  # what is no faster is of no interest

    def add(self, choice: Choice) -> None:
        known = self._found.get(choice.key)
        if choice.seconds >= self.limit or (known is not None and known.seconds <= choice.seconds):
            return
        self._found[choice.key] = choice
        if len(self._found) > self.most:
            del self._found[max(self._found, key=lambda key: self._found[key].seconds)]
        if self._first:
            self.limit = -float("inf")
        elif len(self._found) == self.most:
            self.limit = max(choice.seconds for choice in self._found.values())

    def known(self, key: Key) -> float:
        """Seconds of the choice with this key."""
        found = self._found.get(key)
        return self.limit if found is None else min(found.seconds, self.limit)

    def sorted(self) -> list[Choice]:
        return sorted(self._found.values(), key=lambda choice: (choice.seconds, str(choice.key)))


@dataclass
class Counts:
    """What a search has looked at."""

    branches: int = 0
    tight: int = 0  # that do not fit
