"""Which ranks generate together, and which layers each engine stage holds. Pure.

Generation groups lie over the training ranks without redundancy (HybridFlow, section 5). Where the rollout needs less
tensor parallelism than training has, a group takes ranks at intervals of tp / rollout_tp: each rank's training shard
then lies inside the engine shard, and the ranks in between serve further replicas. Pipeline stages alike. Where it
needs more, the missing factor comes from copies of the weights (dp x cp), and what is still missing from ranks at the
intervals of the other axis.

Lists of ranks ascend: vLLM generates wrong tokens, silently, over lists that do not. Ranks number pp slowest, then
copies, then tp, so within a group the digits stand in this order too.
"""

from dataclasses import dataclass
from math import gcd

from hybridflow.config.ranks import check_engine_sizes
from hybridflow.errors import ConfigError, remedy
from hybridflow.parallel.layout import Layout, RolloutCoordinates, RolloutLayout, Stages, TrainingCoordinates


def rollout_layout(train: Layout, tp: int, pp: int, *, expert_parallel: bool = False) -> RolloutLayout:
    """Engine replicas of pp x tp ranks over all training ranks, by first rank.

    Errors: ConfigError where tp x pp does not divide the number of ranks.
    """
    check_engine_sizes(tp, pp, len(train.ranks))
    factors = _factors(train, tp, pp)
    if factors is None:
        return _blocks(train.ranks, tp, pp, expert_parallel)
    replicas: dict[tuple[int, ...], dict[tuple[int, int], int]] = {}
    for rank in train.ranks:
        replica, within = _replica_and_place(train, rank, factors)
        replicas.setdefault(replica, {})[within] = rank
    found = [tuple(rank for _, rank in sorted(ranks.items())) for ranks in replicas.values()]
    return _ascending(RolloutLayout(tp, pp, tuple(sorted(found)), expert_parallel))


def standalone_layout(ranks: tuple[int, ...], tp: int, pp: int, *, expert_parallel: bool = False) -> RolloutLayout:
    """Engine replicas over ranks of their own: neighbours together. Errors: as `rollout_layout`."""
    check_engine_sizes(tp, pp, len(ranks))
    return _blocks(ranks, tp, pp, expert_parallel)


def check_engine_stages(num_layers: int, pp: int) -> None:
    """Raise ConfigError where there are fewer layers than stages."""
    if num_layers < pp:
        raise ConfigError(
            f"rollout.pipeline_parallel_size = {pp} exceeds num_hidden_layers = {num_layers}: a stage needs a layer"
            f"{remedy({'rollout.pipeline_parallel_size': [num_layers]})}"
        )


def engine_stages(num_layers: int, train: Layout, rollout: RolloutLayout) -> Stages:
    """The layers of each engine stage: consecutive, one at least, cut where training cuts as far as possible.

    Errors: as `check_engine_stages`.
    """
    check_engine_stages(num_layers, rollout.pp)
    counts = _aligned_counts([len(layers) for layers in train.stages(num_layers)], rollout.pp)
    if counts is None or min(counts) == 0 or train.vpp > 1:  # the stages of model chunks are no consecutive layers
        counts = _even(num_layers, rollout.pp)
    starts = [sum(counts[:stage]) for stage in range(rollout.pp)]
    return tuple(tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True))


# ------------------------------------------------------------------------------------------------------- stages


def _aligned_counts(training: list[int], pp: int) -> list[int] | None:
    """Layers of `pp` engine stages that join whole training stages or cut them; None where neither goes up."""
    if len(training) % pp == 0:
        size = len(training) // pp
        return [sum(training[stage * size : (stage + 1) * size]) for stage in range(pp)]
    if pp % len(training) == 0:
        return [count for layers in training for count in _even(layers, pp // len(training))]
    return None


def _even(total: int, parts: int) -> list[int]:
    each, rest = divmod(total, parts)
    return [each + (part < rest) for part in range(parts)]


# ------------------------------------------------------------------------------------------------------- groups


@dataclass(frozen=True)
class _Factors:
    """How the axes of training make up those of the rollout. tp = tp_own x tp_spare, pp likewise."""

    tp_own: int
    tp_spare: int  # the interval
    tp_for_pp: int  # part of tp_spare
    pp_spare: int
    pp_for_tp: int  # part of pp_spare
    copies_for_tp: int
    copies_for_pp: int


def _factors(train: Layout, tp: int, pp: int) -> _Factors | None:
    """None where an axis of the rollout is neither a divisor nor a multiple of that of training."""
    tp_own, pp_own = min(tp, train.tp), min(pp, train.pp)
    if max(tp, train.tp) % tp_own or max(pp, train.pp) % pp_own:
        return None
    tp_spare, pp_spare = train.tp // tp_own, train.pp // pp_own
    for_tp, for_pp = copies_for_engine(train, tp // tp_own, pp // pp_own)
    pp_for_tp, tp_for_pp = tp // tp_own // for_tp, pp // pp_own // for_pp
    # rollout tp x pp divides tp x pp x copies: what copies lack of a factor, the spare ranks of the other axis have
    assert pp_spare % pp_for_tp == tp_spare % tp_for_pp == 0, f"{train} cannot make up {tp} x {pp}"
    return _Factors(tp_own, tp_spare, tp_for_pp, pp_spare, pp_for_tp, copies_for_tp=for_tp, copies_for_pp=for_pp)


def copies_for_engine(train: Layout, tp: int, pp: int) -> tuple[int, int]:
    """How many copies of the weights an engine takes that is tp and pp times as wide as training is."""
    for_tp = gcd(tp, train.copies("dense"))
    return for_tp, gcd(pp, train.copies("dense") // for_tp)


def _replica_and_place(train: Layout, rank: int, factors: _Factors) -> tuple[tuple[int, ...], tuple[int, int]]:
    """(which replica, (rollout pp rank, rollout tp rank)) of a training rank."""
    f, at = factors, train.coordinates(rank)
    tp_own, tp_left = divmod(at.tp, f.tp_spare)
    tp_for_pp, tp_rest = divmod(tp_left, f.tp_spare // f.tp_for_pp)
    pp_own, pp_left = divmod(at.pp, f.pp_spare)
    pp_for_tp, pp_rest = divmod(pp_left, f.pp_spare // f.pp_for_tp)
    # neighbouring copies are taken together: they lie on the nearest ranks
    copies_left, copy_for_tp = divmod(train.copy_index("dense", at), f.copies_for_tp)
    copies_rest, copy_for_pp = divmod(copies_left, f.copies_for_pp)
    tp_rank = (pp_for_tp * f.copies_for_tp + copy_for_tp) * f.tp_own + tp_own
    pp_rank = (pp_own * f.copies_for_pp + copy_for_pp) * f.tp_for_pp + tp_for_pp
    return (pp_rest, copies_rest, tp_rest), (pp_rank, tp_rank)


def _blocks(ranks: tuple[int, ...], tp: int, pp: int, expert_parallel: bool) -> RolloutLayout:
    replicas = tuple(ranks[i : i + tp * pp] for i in range(0, len(ranks), tp * pp))
    return _ascending(RolloutLayout(tp, pp, replicas, expert_parallel))


def _ascending(rollout: RolloutLayout) -> RolloutLayout:
    for group in rollout.tp_groups() + rollout.pp_groups():
        assert group == sorted(set(group)), f"ranks of a group must ascend: {group}"
    return rollout


def dealt_origin(engine: RolloutCoordinates, train: Layout, rollout: RolloutLayout) -> TrainingCoordinates:
    """Where in training a rank that only generates receives from first, dealt to spread the load.

    Engine ranks that need the same training shard count here: those at the same place of other replicas, and the
    neighbours that share one. To count the others too would leave most training ranks idle: tp rank 0 of every
    engine might then be served by copy 0 alone, whose other ranks hold nothing for it.
    """
    shared_tp, shared_pp = max(1, rollout.tp // train.tp), max(1, rollout.pp // train.pp)
    number = (engine.replica * shared_tp + engine.tp % shared_tp) * shared_pp + engine.pp % shared_pp
    turn, copy = divmod(number, train.copies("dense"))
    return train.at((engine.tp + turn) % train.tp, copy, (engine.pp + turn) % train.pp)
