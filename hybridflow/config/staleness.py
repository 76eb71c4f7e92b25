"""Rollouts older than the weights that train on them: which configs may have them, and the correction by default."""

from collections.abc import Mapping
from typing import Any, Protocol

from hybridflow.config.algorithms import OPO, Algorithm, Distill, ReMax
from hybridflow.config.data import DataConfig
from hybridflow.config.roles import PartialRollouts, RoleConfig, RolloutConfig
from hybridflow.config.run import CheckpointConfig
from hybridflow.config.sampling import SamplingConfig
from hybridflow.parallel.ranks import shown


class StaleConfig(Protocol):
    """What stale rollouts ask of a config."""

    @property
    def data(self) -> DataConfig: ...
    @property
    def sampling(self) -> SamplingConfig: ...
    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def algorithm(self) -> Algorithm: ...
    @property
    def checkpoint(self) -> CheckpointConfig: ...
    def roles(self) -> Mapping[str, RoleConfig]: ...


# Truncated importance weights, with the cap that `importance` has by default.
CORRECTION = {"kind": "token", "cap": 2.0}
ON_POLICY = {
    ReMax: "needs a sampled and a greedy response of the same weights",
    OPO: "is exactly on-policy",
    Distill: "learns from the actor's present responses alone",
}


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
    rollout, algorithm = config.rollout, config.algorithm
    if not rollout.max_staleness:
        if rollout.partial is not None:
            raise ValueError(
                "rollout.partial needs rollout.max_staleness of 1 or more: what goes on in the next iteration has "
                "tokens that are one update old"
            )
        return
    key = f"rollout.max_staleness = {rollout.max_staleness}"
    if rollout.partial is None:
        if rollout.max_staleness > 1:
            raise ValueError(f"{key}: more than 1 needs rollout.partial")
        _check_ranks(config, key)
    else:
        _check_partial(config, rollout.partial)
    for kind, why in ON_POLICY.items():
        if isinstance(algorithm, kind):
            raise ValueError(f"{key}: algorithm {algorithm.name} {why}, and a stale rollout has older ones")
    if config.checkpoint.save_rollout:
        raise ValueError(
            f"{key}: checkpoint.save_rollout = true saves nothing more: a checkpoint has the next rollout already. "
            "Leave save_rollout out"
        )
    if rollout.score_while_waiting and rollout.partial is None:
        raise ValueError(
            f"{key}: rollout.score_while_waiting = true has no waiting engine to score on: engines generate while "
            "models train. Leave score_while_waiting out"
        )
    changed = config.sampling.changed_distribution()
    if changed and algorithm.policy.importance is not None:
        raise ValueError(
            f"{key} needs importance weights, which cannot go with {', '.join(changed)}: the engine's log-probs then "
            "belong to the truncated or penalised distribution. algorithm.policy.importance: null trains without"
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


def _check_partial(config: StaleConfig, partial: PartialRollouts) -> None:
    """What rows that go on in the next iteration cannot go with."""
    key = f"rollout.partial.oversample = {partial.oversample:g}"
    if partial.oversample - 1 > config.rollout.max_staleness:
        raise ValueError(
            f"{key}: more responses go on than later iterations train on before the responses are older than "
            f"rollout.max_staleness = {config.rollout.max_staleness}: oversample is 1 + max_staleness at most"
        )
    if config.rollout.score_while_waiting:
        raise ValueError("rollout.partial: rollout.score_while_waiting = true needs to know which rows come")
    neutral = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop": (),
        "bad_words": (),
    }
    for name, value in neutral.items():
        if getattr(config.sampling, name) != value:
            raise ValueError(
                f"rollout.partial: sampling.{name} = {getattr(config.sampling, name)} looks at a whole response, which "
                "is generated in several parts. Leave one of the two keys out"
            )


def _check_ranks(config: StaleConfig, key: str) -> None:
    """The engine has ranks of its own: others train while it generates."""
    engine = config.rollout.ranks
    if engine is None:
        raise ValueError(f"{key}: the engine generates while models train. Give the engine ranks: rollout.ranks")
    if 0 in engine:
        raise ValueError(
            f"{key}: rollout.ranks = {shown(engine)} has rank 0, which trains and writes the run's directory"
        )
    for name, role in config.roles().items():
        if role.ranks is None:
            raise ValueError(f"{key}: {name} lies on all ranks. Give {name}.ranks: those that are not the engine's")
        shared = sorted(set(role.ranks) & set(engine))
        if shared:
            raise ValueError(
                f"{key}: {name}.ranks = {shown(role.ranks)} and rollout.ranks = {shown(engine)} share {shown(shared)}, "
                "but the engine generates while models train"
            )
