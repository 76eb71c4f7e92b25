"""Results of the optimizer steps of an iteration, put together over all ranks; and checks that numbers are finite."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybridflow.batch import RolloutBatch
from hybridflow.parallel.exchange import Exchange
from hybridflow.recording.iteration import Metrics
from hybridflow.roles.base import TrainedRole
from hybridflow.roles.policy import Actor


def step_metrics(
    roles: Sequence[TrainedRole], rows: Mapping[str, Sequence[Tensor]], batch: RolloutBatch, exchange: Exchange
) -> Metrics:
    """Means over the steps of each role. rows: by role, of the batch in each step, as far as they are known.

    Collective. Errors: NonFinite, on every rank, where a step was not taken.
    """
    metrics: Metrics = {}
    for role in roles:
        for names in dict.fromkeys(step.names for step in role.steps):  # one, unless objectives differ
            numbers = [i for i, step in enumerate(role.steps) if step.names == names]
            results = exchange.sum(torch.stack([role.steps[i].values for i in numbers]))
            _check(role, numbers, results, rows[role.name], batch=batch, exchange=exchange)
            means = zip(names, results.mean(0).tolist(), strict=True)
            metrics |= {f"{role.name}/{name}": mean for name, mean in means}
    return metrics | {f"{role.name}/lr": role.lr for role in reversed(roles)}


def routing_metrics(actor: Actor, exchange: Exchange) -> tuple[Metrics, dict[int, float]]:
    """Of a mixture of experts, and the load of the experts by layer. Collective, one message; none of a dense model.

    `rollout/experts_differ`: how often the trainer would have chosen other experts than the engine, whose choice it
    replays. The load of a layer's experts is the most tokens of an expert over the mean of the experts: 1 where all
    have as many. `rollout/experts_load_max_over_mean` is the mean of the layers that have experts, and
    `rollout/experts_load_worst_layer` the largest. `models.routing.ExpertLoad` says which tokens count, and
    `Actor.expert_load` in which passes.
    """
    if not actor.spec.num_experts:
        return {}, {}
    own = torch.cat([actor.routing_counts, actor.expert_load.flatten()])
    # tensor-parallel ranks choose alike, and one counts; else each rank counts the rank's tokens
    alike = actor.grid.layout.dense_per_expert_copy == 1
    if not actor.grid.inside or (alike and actor.grid.tp_rank):
        own.zero_()
    differ, pairs, *tokens = exchange.sum(own).tolist()
    metrics: Metrics = {"rollout/experts_differ": differ / pairs} if pairs else {}
    of_layers = load_of_layers(torch.tensor(tokens).view_as(actor.expert_load))
    if of_layers:
        metrics["rollout/experts_load_max_over_mean"] = sum(of_layers.values()) / len(of_layers)
        metrics["rollout/experts_load_worst_layer"] = max(of_layers.values())
    return metrics, of_layers


def load_of_layers(tokens: Tensor) -> dict[int, float]:
    """By number of the layer the most tokens of an expert over the mean. tokens: (layers, experts).

    A layer without tokens has no experts.
    """
    of_layers = zip(tokens.double().max(1).values.tolist(), tokens.double().mean(1).tolist(), strict=True)
    return {layer: most / mean for layer, (most, mean) in enumerate(of_layers) if mean}


def _check(
    role: TrainedRole,
    numbers: Sequence[int],
    results: Tensor,
    rows: Sequence[Tensor],
    *,
    batch: RolloutBatch,
    exchange: Exchange,
) -> None:
    """Raise NonFinite where a step of `role` was not taken. Collective if so.

    numbers: of the steps. results: (steps, names), the sums over all ranks. rows: of the batch in each step of the
    iteration, as far as they are known.
    """
    bad = (~results.isfinite()).any(1).nonzero()
    if not len(bad):
        return
    at = int(bad[0])
    number = numbers[at]
    values = dict(zip(role.steps[number].names, results[at].tolist(), strict=True))
    row = _first_row(role.steps[number].row, exchange)
    where = "the gradient alone, every loss is finite"
    if row is not None and number < len(rows):
        where = f"the loss of {row_label(int(rows[number][row]), batch)}"
    elif row is not None:
        where = f"the loss of row {row} of the mini-batch"
    raise NonFinite(
        f"{role.name}, step {number + 1} of the iteration: loss {values['loss']}, gradient norm {values['grad_norm']}; "
        f"first in {where}",
        batch.tensors(),
    )


def _first_row(own: int | None, exchange: Exchange) -> int | None:
    """The first row that any rank has found, if one has: the largest of negative numbers."""
    found = -torch.inf if own is None or own < 0 else -float(own)
    largest = float(exchange.maximum(torch.tensor(found, dtype=torch.float64, device=exchange.device)))
    return None if largest == -torch.inf else int(-largest)


class NonFinite(Exception):
    """A NaN or an infinity, known to every rank alike. `tensors`: what was at hand, for a dump."""

    def __init__(self, what: str, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(what)
        self.tensors = dict(tensors)


def check_finite(known: Mapping[str, Tensor], rollout: RolloutBatch) -> None:
    """Raise NonFinite for the first of some (T,) or (N,) tensors that are not finite everywhere.

    One of (N + M,) is of the rollout's rows and then of those of a second rollout to the same prompts.
    """
    for name, values in known.items():
        if values.sum().isfinite():  # no sum with a NaN or an infinity is; one of finite numbers may overflow
            continue
        bad = (~values.isfinite()).nonzero()
        if len(bad):
            at = int(bad[0])
            row = int(_rows_of(torch.tensor([at]), rollout)) if len(values) == len(rollout.input_ids) else at
            where = f"row {row - len(rollout)} of the second rollout"
            if row < len(rollout):
                where = row_label(row, rollout)
            raise NonFinite(f"{name} is {float(values[at])} in {where}", {**rollout.tensors(), **known})


def _rows_of(tokens: Tensor, batch: RolloutBatch) -> Tensor:
    return torch.searchsorted(batch.lengths.cumsum(0), tokens, right=True)


def row_label(row: int, batch: RolloutBatch) -> str:
    return f"row {row} (a response to prompt {int(batch.prompt_indices[row])} of the iteration)"
