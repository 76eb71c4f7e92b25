"""Rollouts older than the weights that train on them: which configs may have them, and the correction by default."""

from collections.abc import Mapping
from typing import Any, Protocol

from hybridflow.config.algorithms import Algorithm
from hybridflow.config.roles import RoleConfig, RolloutConfig
from hybridflow.errors import Mendable
from hybridflow.parallel.ranks import shown


class StaleConfig(Protocol):
    """What stale rollouts ask of a config."""

    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def algorithm(self) -> Algorithm: ...
    def roles(self) -> Mapping[str, RoleConfig]: ...


# Truncated importance weights, with the cap that `importance` has by default.
CORRECTION = {"kind": "token", "cap": 2.0}


def with_correction(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config as read: importance weights where rollouts may be stale, and the config says nothing of the weights."""
    rollout, algorithm = given.get("rollout"), given.get("algorithm", {})
    if not isinstance(rollout, Mapping) or not isinstance(algorithm, Mapping) or not rollout.get("max_staleness"):
        return given
    policy = algorithm.get("policy", {})
    if not isinstance(policy, Mapping) or policy.get("old_log_probs") == "engine" or "importance_cap" in algorithm:
        return given
    if policy.keys() & {"importance", "importance_cap"}:
        return given
    return {**given, "algorithm": {**algorithm, "policy": {**policy, "importance": CORRECTION}}}


def check_staleness(config: StaleConfig) -> None:
    """Errors: ValueError with what a config of stale rollouts cannot have."""
    rollout, partial = config.rollout, config.rollout.partial
    if rollout.max_staleness and partial is None:
        _check_ranks(config, f"rollout.max_staleness = {rollout.max_staleness}")
    if partial is not None and partial.oversample - 1 > rollout.max_staleness:
        raise Mendable(
            f"rollout.partial.oversample = {partial.oversample:g}: more responses go on than later iterations train on "
            "before the responses are older than "
            f"rollout.max_staleness = {rollout.max_staleness}: oversample is 1 + max_staleness at most",
            {"rollout.partial.oversample": [1 + rollout.max_staleness]},
        )


def staleness_notes(config: StaleConfig) -> list[str]:
    """What weighs tokens of older weights, and when the engine has nothing to do; none in a synchronous run."""
    if not config.rollout.max_staleness:
        return []
    return [*partial_notes(config, cuda=False), _correction_note(config)]  # the engine says why it has no graphs


def partial_notes(config: StaleConfig, *, cuda: bool) -> list[str]:
    """When the engine of partial rollouts has nothing to do, and when the engine is slow."""
    partial, notes = config.rollout.partial, list[str]()
    if partial is not None and cuda and config.algorithm.policy.replay_routing:
        notes.append(
            "rollout.partial with algorithm.policy.replay_routing: the engine runs without CUDA graphs and records "
            "experts by hooks, so that each of its steps takes longer. Set one of the two to null or false"
        )
    if partial is None or partial.oversample < 2:
        return notes
    return [
        *notes,
        f"rollout.partial.oversample = {partial.oversample:g}: while the oldest responses end, a whole batch of others "
        "may end too. The next iteration then generates nothing. A value below 2 keeps the engine at work",
    ]


def _correction_note(config: StaleConfig) -> str:
    key, policy = f"rollout.max_staleness = {config.rollout.max_staleness}", config.algorithm.policy
    if policy.importance is not None:
        bounds = f"{policy.importance.kind}, {policy.importance.bounds[1]:g} at most"
        return f"{key}: tokens of older weights have importance weights (algorithm.policy.importance: {bounds})"
    if policy.old_log_probs == "engine":
        return f"{key}: ratios are to the log-probs of the engine, which chose the tokens (old_log_probs: engine)"
    return f"{key}: tokens of older weights have no importance weights (algorithm.policy.importance: null)"


def _check_ranks(config: StaleConfig, key: str) -> None:
    """The engine has ranks of its own: others train while it generates."""
    engine = config.rollout.ranks or ()
    if 0 in engine:
        raise Mendable(
            f"{key}: rollout.ranks = {shown(engine)} has rank 0, which trains and writes the run's directory",
            {"rollout.ranks": [shown(engine[1:])]} if engine[1:] else {},
        )
    for name, role in config.roles().items():
        own = role.ranks or ()
        shared = sorted(set(own) & set(engine))
        if shared:
            apart = {f"{name}.ranks": set(own) - set(engine), "rollout.ranks": set(engine) - set(own)}
            raise Mendable(
                f"{key}: {name}.ranks = {shown(own)} and rollout.ranks = {shown(engine)} share {shown(shared)}, "
                "but the engine generates while models train",
                {key: [shown(sorted(ranks))] for key, ranks in apart.items() if ranks},
            )
