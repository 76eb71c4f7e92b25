"""A row of a rollout, from the engine's first token to the batch: one record however rows are generated.

    row = RolloutRow([7, 8], [-0.1, -0.2])                     # what a call of the engine has sampled
    row.take(RolloutRow([4], [-0.3], state=ENDED, calls=1))    # what a further call adds
    tensors = gathered({0: row}, 2, exchange)           # rows of all replicas; a file of a checkpoint has the same
    rows = rows_of(tensors)

A row that goes on in a later iteration has the state RUNNING. Where an environment answers, `rows.TurnRow` writes it.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridflow.batch import token_index
from hybridflow.parallel.exchange import Exchange, PartialTensor
from hybridflow.rollout.recorded import RecordedPiece

SAMPLED, BEGINS = 1, 2  # of a token: the policy chose it; a branch of the row begins with it
RUNNING, ENDED, CUT = 0, 1, 2  # of a row; CUT: it has ended at a limit on the length
OF_TOKENS = ("token_ids", "log_probs", "flags", "versions")
Tensors = Mapping[str, Tensor]


@dataclass
class Written:
    """Tokens behind a prompt, and what is known of each of them.

    log_probs: under the distribution that was sampled from; 0 of a token that the policy did not choose. flags: SAMPLED
    and BEGINS; without any the policy chose all. versions: of the actor, when each token came; none where nobody asks.
    """

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    flags: bytearray = field(default_factory=bytearray)
    versions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.flags = self.flags or bytearray([SAMPLED]) * len(self.token_ids)

    def add(self, token_ids: Sequence[int], version: int, log_probs: Sequence[float] | None = None) -> None:
        """log_probs: of what the policy has chosen; None of what somebody else has written."""
        self.token_ids += token_ids
        self.log_probs += [0.0] * len(token_ids) if log_probs is None else log_probs
        self.flags += bytes([0 if log_probs is None else SAMPLED]) * len(token_ids)
        self.versions += [version] * len(token_ids)

    def extend(self, other: "Written", *, begins: bool = False) -> None:
        """begins: another branch, with the first of these tokens."""
        place = len(self.token_ids)
        for name in OF_TOKENS:
            getattr(self, name).extend(getattr(other, name))
        if begins:
            self.flags[place] |= BEGINS

    def cut(self, number: int) -> None:
        """Keep the first `number` tokens."""
        for name in OF_TOKENS:
            del getattr(self, name)[number:]


@dataclass
class RolloutRow(Written):
    """rewards: of an environment, NaN of a row that has failed. calls: of the engine that have taken the row on.

    experts: (tokens, layers, k) that the engine of this rank has recorded of the row's tokens, in one call.
    pieces: what all ranks know of the engines' experts, of all tokens but the last.
    """

    state: int = RUNNING
    rewards: Sequence[float] = ()
    calls: int = 0
    experts: Tensor | None = field(default=None, compare=False)
    pieces: list[RecordedPiece] = field(default_factory=list, compare=False)

    @property
    def truncated(self) -> bool:
        """Whether the row has ended at a limit on the length."""
        return self.state == CUT

    def take(self, more: "RolloutRow") -> None:
        """What further calls of the engine add."""
        self.extend(more)
        self.calls, self.state, self.rewards = self.calls + more.calls, more.state, more.rewards
        self.pieces += more.pieces


def tensors_of(rows: Sequence[RolloutRow], num_rewards: int = 0, names: Sequence[str] = OF_TOKENS) -> dict[str, Tensor]:
    """rows: (N, 3) int64 of tokens, calls and states. rewards: (N, parts) float32, NaN where a row has none.

    names: of the tokens, (T,): token_ids and versions int32, log_probs float32, flags uint8. Without versions where
    nobody asks for them.
    """
    rewards = [row.rewards[:num_rewards] or (float("nan"),) * num_rewards for row in rows]
    sizes = [[len(row.token_ids) for row in rows], [row.calls for row in rows], [row.state for row in rows]]
    return {
        "rows": torch.stack([torch.tensor(each, dtype=torch.int64) for each in sizes], dim=1),
        **{name: _of_tokens(rows, name) for name in names},
        "rewards": torch.tensor(rewards, dtype=torch.float32).view(len(rows), num_rewards),
    }


def _of_tokens(rows: Sequence[RolloutRow], name: str) -> Tensor:
    values = (getattr(row, name) for row in rows)
    if name == "flags":
        return torch.from_numpy(np.asarray(bytearray().join(values), dtype=np.uint8))
    return flat("f" if name == "log_probs" else "i", values)


def rows_of(tensors: Tensors) -> list[RolloutRow]:
    """What `tensors_of` has made tensors of. Without flags the policy chose all tokens; versions may be missing."""
    sizes = tensors["rows"].tolist()
    counts = [count for count, _, _ in sizes]
    found = [RolloutRow(state=state, calls=calls) for _, calls, state in sizes]
    for name in (name for name in OF_TOKENS if name in tensors):
        for row, values in zip(found, tensors[name].split(counts), strict=True):
            setattr(row, name, bytearray(values.tolist()) if name == "flags" else values.tolist())
    for row in found:
        row.flags = row.flags or bytearray([SAMPLED]) * len(row.token_ids)
    if "rewards" in tensors:
        for row, rewards in zip(found, tensors["rewards"].tolist(), strict=True):
            row.rewards = tuple(rewards) if row.calls else ()
    return found


def gathered(
    own: Mapping[int, RolloutRow],
    num_rows: int,
    exchange: Exchange,
    *,
    num_rewards: int = 0,
    names: Sequence[str] = OF_TOKENS,
) -> dict[str, Tensor]:
    """The tensors of all replicas' rows: collective. own: what this rank contributes; of a replica one rank does so.

    num_rewards: parts that an environment gives a row. names: of tokens; without flags the policy chose all.
    A row that nobody contributes has neither tokens nor calls.
    """
    where, rows = torch.tensor(list(own), dtype=torch.int64), list(own.values())
    mine = tensors_of(rows, num_rewards, ())

    def columns(values: Tensor) -> Tensor:
        return torch.stack(exchange.gather_all([PartialTensor(num_rows, where, each) for each in values.T]), dim=1)

    found = {"rows": columns(mine["rows"])}
    counts = found["rows"][:, 0]
    at, size = token_index(counts, where), int(counts.sum())
    found |= {name: exchange.gather(PartialTensor(size, at, _of_tokens(rows, name))) for name in names}
    return found | {"rewards": columns(mine["rewards"])} if num_rewards else found


def flat(code: str, lists: Iterable[list[Any]]) -> Tensor:
    """One tensor of all numbers: `i` int32, `f` float32. No object is made for a number, as torch.tensor does."""
    found = array(code)
    for each in lists:
        found.fromlist(each)
    return torch.from_numpy(np.asarray(found))
