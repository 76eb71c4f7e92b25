"""The tables of extend/algorithm.md: the fields of a rollout, and the fields that each objective reads.

An objective is called with tokens that note which fields are asked for: the table says what the code does.
"""

from collections.abc import Iterator, Mapping
from typing import get_args

import torch
from torch import Tensor

from docs.generator.markdown import code, listed, table
from hybridflow.batch import DIMENSIONS, Per, RolloutBatch, Tokens, marks
from hybridflow.config.losses import KL, Importance, PolicyKind, PolicyLoss
from hybridflow.roles.objectives import KLTerm, negative_log_likelihood, policy_loss, value_loss

OF_ROLLOUT: Mapping[str, str] = {
    "input_ids": "prompt and response, sequence after sequence",
    "lengths": "tokens of a sequence",
    "prompt_lengths": "tokens before the response",
    "prompt_indices": "which of `run.prompts` the row answers",
    "truncated": "whether the response was cut at the limit",
    "response_mask": "whether the policy chose the token",
    "rollout_log_probs": "the engine's log-prob of the token",
    "record_ids": "the row's record of the engine's experts; -1 where there is none; None where no row has one",
    "environment_rewards": "rewards of `data.environment`, a column a part; NaN where the row has failed; or None",
    "branch_starts": "the first token of each further sequence of a row; None where no row has one",
    "versions": "how often the actor that chose the token had been updated; None without `rollout.max_staleness`",
}
READ: Mapping[str, str] = {
    "log_probs": "`run.old_log_probs(rollout)`",
    "advantages": "the flow",
    "rollout_log_probs": "`run.generate()`",
    "ref_log_probs": "`run.ref_log_probs(rollout)`",
    "values": "`run.critic.values(rollout)`",
    "returns": "the flow",
}
SHAPES = {Per.VERSIONED_TOKEN: "(T, 1)", Per.TOKEN: "(T,)", Per.SEQUENCE: "(N,)", Per.REWARDED_SEQUENCE: "(N, parts)"}
COUNT = 4  # tokens that an objective is asked about
OFF = KL(use="none")


class Noted(Tokens):
    """Tokens that give a number for every field, and note the names."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Tensor:
        self.names.append(name)
        return torch.zeros(COUNT)

    @property
    def sequences(self) -> Tensor:
        return torch.zeros(COUNT, dtype=torch.int64)


def part(what: str) -> str:
    """what: `fields rollout` or `fields objectives`."""
    return {"rollout": rollout_table, "objectives": objectives_table}[what.split()[1]]()


def rollout_table() -> str:
    flags = torch.tensor([False, True])
    numbers = torch.ones(1, dtype=torch.int64)
    one = RolloutBatch(
        *(numbers.new_zeros(2), 2 * numbers, numbers, 0 * numbers, flags[:1], flags, torch.zeros(2)),
        record_ids=0 * numbers,
        environment_rewards=torch.zeros(1, 1),
        branch_starts=flags,
        versions=torch.zeros(2, 1, dtype=torch.int32),
    )
    rows = []
    for name, per in marks(RolloutBatch).items():
        tensor: Tensor = getattr(one, name)
        assert tensor.dim() == DIMENSIONS.get(per, 1), name
        rows.append((code(name), SHAPES[per], str(tensor.dtype).removeprefix("torch."), OF_ROLLOUT[name]))
    return table(("field", "shape", "dtype", "content"), rows)


def objectives_table() -> str:
    rows = [(what, listed(names), ", ".join(READ[name] for name in names)) for what, names in _read()]
    return table(("objective", "reads", "from"), rows)


def _read() -> Iterator[tuple[str, tuple[str, ...]]]:
    """What a config says, and the fields that the objective reads for that, each once."""
    kinds = {kind: _policy({"kind": kind} | _needed(kind)) for kind in get_args(PolicyKind)}
    for names in dict.fromkeys(kinds.values()):
        alike = [f"`{kind}`" for kind, own in kinds.items() if own == names]
        yield f"`run.policy_loss`, `policy.kind` {', '.join(alike)}", names
    plain = kinds["clip"]
    more = {
        "`policy.importance`": _policy({"importance": Importance()}),
        "`policy.entropy_coef`": _policy({"entropy_coef": 0.1}),
        "`kl.use: loss`": _policy({}, KL(use="loss")),
    }
    for key, names in more.items():
        yield f"more with {key}", tuple(name for name in names if name not in plain)
    for what, clip in (("`value_loss(0.2)`", 0.2), ("`value_loss(None)`, without a clip", None)):
        noted = Noted()
        value_loss(clip).loss(torch.zeros(COUNT), noted)
        yield what, _once(noted)
    noted = Noted()
    negative_log_likelihood().loss(torch.zeros(COUNT), torch.zeros(COUNT), noted)
    yield "`negative_log_likelihood()`", _once(noted)


def _needed(kind: str) -> dict[str, str]:
    return {"loss_mean": "sequence_token_mean"} if kind == "gspo" else {}


def _policy(keys: Mapping[str, object], kl: KL = OFF) -> tuple[str, ...]:
    noted = Noted()
    config = PolicyLoss.model_validate(keys)
    policy_loss(config, KLTerm(kl, kl.coef)).loss(torch.zeros(COUNT), torch.zeros(COUNT), noted)
    return _once(noted)


def _once(noted: Noted) -> tuple[str, ...]:
    return tuple(name for name in READ if name in noted.names)
