"""What engine replicas tell each other through the store while a rollout is made.

    board.done()                          # this replica has generated all of its rows
    board.others_generate()
    board.announce(unit, tokens)          # while somebody waits: a unit whose responses are all there
    board.announced()                     # those that are new to this replica
    board.take(model, unit)               # whether it is this replica that runs it

One rank of each replica asks. Notes are written over in the next rollout: the store does not grow.
"""

import base64
from collections.abc import Sequence

import numpy as np

from hybridflow.parallel.noticeboard import Noticeboard

DONE, ANNOUNCED = "done", "announced"
TokenLists = Sequence[Sequence[int]]


class UnitBoard:
    """Of one replica. Where the store does not answer nobody generates, nothing is announced and nothing is to do."""

    def __init__(self, notices: Noticeboard, replica: int, num_replicas: int) -> None:
        self._notices, self._replica, self._num_replicas = notices, replica, num_replicas
        self._rollout = 0  # counted over the run, and so are the numbers below
        self._first = self._seen = 0  # announcements before this rollout, and read

    def begin(self) -> None:
        """Another rollout is generated. No replica has begun that has not settled the one before."""
        self._rollout += 1

    def settle(self) -> None:
        """All replicas have generated theirs: whatever was announced has been."""
        self._first = self._seen = self._notices.add(ANNOUNCED, 0) or self._seen

    def done(self) -> None:
        self._notices.add(DONE)

    def num_done(self) -> int:
        """Replicas that have generated all of their rows."""
        return max((self._notices.add(DONE, 0) or 0) - (self._rollout - 1) * self._num_replicas, 0)

    def others_generate(self) -> bool:
        return 0 < self.num_done() < self._num_replicas

    def announce(self, unit: int, responses: TokenLists) -> None:
        """responses: the tokens of each row of the unit."""
        number = self._notices.add(ANNOUNCED)
        if number is not None:
            self._notices.post(self._key(number), f"{self._rollout} {unit} {_text(responses)}")

    def announced(self) -> list[tuple[int, TokenLists]]:
        """(unit, responses) that this replica has not been told before."""
        found = []
        for number in range(self._seen + 1, (self._notices.add(ANNOUNCED, 0) or 0) + 1):
            rollout, _, rest = (self._notices.read(self._key(number)) or "").partition(" ")
            if rollout != str(self._rollout):  # it is being written: next time
                break
            unit, _, text = rest.partition(" ")
            found.append((int(unit), _responses(text)))
            self._seen = number
        return found

    def take(self, model: int, unit: int) -> bool:
        """Whether no replica has taken it for this model, and this one has now."""
        key, mine = f"taken/{model}/{unit}", f"{self._rollout} {self._replica}"
        before = self._notices.read(key) or ""
        if before.partition(" ")[0] == str(self._rollout):
            return False
        return self._notices.swap(key, before, mine) == mine

    def _key(self, number: int) -> str:
        return f"{ANNOUNCED}/{number - self._first}"


def _text(responses: TokenLists) -> str:
    """lengths, and all tokens one after the other, as int32 in base 64."""
    parts = [len(responses), *map(len, responses), *(token for tokens in responses for token in tokens)]
    return base64.b64encode(np.array(parts, dtype=np.int32).tobytes()).decode()


def _responses(text: str) -> TokenLists:
    parts = np.frombuffer(base64.b64decode(text), dtype=np.int32).tolist()
    lengths, tokens = parts[1 : 1 + parts[0]], iter(parts[1 + parts[0] :])
    return [[next(tokens) for _ in range(length)] for length in lengths]
