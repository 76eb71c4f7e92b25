"""What engine replicas tell each other through the store while a rollout is made.

    board.done()                          # this replica has generated all rows of the replica
    board.others_generate()               # asks the store
    board.announce(unit, tokens)          # while somebody waits: a unit whose responses are all there
    board.announced()                     # those that are new to this replica, as the store said last
    board.take(model, unit)               # whether it is this replica that runs it
    board.responses(unit)                 # the tokens of a unit that another replica has announced

One rank of each replica asks. A replica has one note, which says how far it is and what it has announced: a note that
comes late or twice says the same. Tokens are read by the replica that has taken the unit, and by no other. Notes are
written over in the next rollout: the store does not grow.
"""

import base64
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hybridflow.parallel.store_client import StoreClient

TokenLists = Sequence[Sequence[int]]


class ReplicaProgress(NamedTuple):
    """What the note of a replica says."""

    rollout: int  # counted over the run
    done: bool  # all rows of this rollout are generated
    units: tuple[int, ...]  # announced in it

    @classmethod
    def read(cls, text: str) -> "ReplicaProgress":
        rollout, done, *units = map(int, text.split())
        return cls(rollout, bool(done), tuple(units))

    def __str__(self) -> str:
        return " ".join(map(str, (self.rollout, int(self.done), *self.units)))


class WorkQueue:
    """Of one replica. Where the store does not answer nobody generates, nothing is announced and nothing is to do."""

    def __init__(self, notices: StoreClient, replica: int, num_replicas: int) -> None:
        self._notices, self._replica = notices, replica
        self._keys = [_progress_key(number) for number in range(num_replicas)]
        self._own = ReplicaProgress(0, False, ())
        self._tell(self._own)
        self._last: list[ReplicaProgress] = []  # of every replica, as the store said last
        self._seen: set[int] = set()

    def begin(self) -> None:
        """Another rollout is generated. No replica begins before all have generated theirs of the one before."""
        self._own = ReplicaProgress(self._own.rollout + 1, False, ())
        self._last, self._seen = [], set()

    def done(self) -> None:
        """Returns at once; the note is written as soon as the store takes it."""
        self._tell(self._own._replace(done=True))

    def num_done(self) -> int:
        """Replicas that have generated all of their rows."""
        notes = self._notices.read_all(self._keys)
        self._last = [] if notes is None else [ReplicaProgress.read(text) for text in notes]
        return sum(progress.done for progress in self._current())

    def others_generate(self) -> bool:
        return 0 < self.num_done() < len(self._keys)

    def announce(self, unit: int, responses: TokenLists) -> None:
        """responses: the tokens of each row of the unit."""
        if self._notices.post(_tokens_key(unit), f"{self._own.rollout} {_text(responses)}"):
            self._tell(self._own._replace(units=(*self._own.units, unit)))

    def announced(self) -> list[int]:
        """Units that this replica has not seen before, by replica."""
        found = [unit for replica in self._current() for unit in replica.units if unit not in self._seen]
        self._seen.update(found)
        return found

    def take(self, model: int, unit: int) -> bool:
        """Claim the unit for this model: True where this replica is the first to claim."""
        key, mine = f"taken/{model}/{unit}", f"{self._own.rollout} {self._replica}"
        before = self._notices.read(key) or ""
        if before.partition(" ")[0] == str(self._own.rollout):
            return False
        return self._notices.swap(key, before, mine) == mine

    def responses(self, unit: int) -> TokenLists | None:
        """Those of a unit that was announced in this rollout; None where the store does not answer."""
        rollout, _, text = (self._notices.read(_tokens_key(unit)) or "").partition(" ")
        return _responses(text) if rollout == str(self._own.rollout) else None

    def _tell(self, progress: ReplicaProgress) -> None:
        self._own = progress
        self._notices.deliver(_progress_key(self._replica), str(progress))

    def _current(self) -> list[ReplicaProgress]:
        """Of the replicas that are in this rollout."""
        return [progress for progress in self._last if progress.rollout == self._own.rollout]


def _progress_key(replica: int) -> str:
    return f"progress/{replica}"


def _tokens_key(unit: int) -> str:
    return f"tokens/{unit}"


def _text(responses: TokenLists) -> str:
    """lengths, and all tokens one after the other, as int32 in base 64."""
    parts = [len(responses), *map(len, responses), *(token for tokens in responses for token in tokens)]
    return base64.b64encode(np.array(parts, dtype=np.int32).tobytes()).decode()


def _responses(text: str) -> TokenLists:
    parts = np.frombuffer(base64.b64decode(text), dtype=np.int32).tolist()
    lengths, tokens = parts[1 : 1 + parts[0]], iter(parts[1 + parts[0] :])
    return [[next(tokens) for _ in range(length)] for length in lengths]
