"""Where ranks stand, without any process group: training layouts TP x CP x DP x PP and rollout layouts. Pure.

Ranks of a layout are numbered with tp fastest, then cp, dp, pp: tp neighbours share a node, pipeline stages lie far
apart. What a rank holds follows from the rank's coordinates alone, on every rank alike, and so does every plan.

Weights are in two groups. Dense ones are cut over the tp ranks of a replica. Experts cut the same ranks of a stage
anew: etp fastest, then ep, then copies. With etp x ep = tp the same ranks hold a copy of both; with more, as many
neighbouring copies of the dense weights as that takes share one copy of the experts.

The dp replicas see different rows. Within one, cp neighbours share the tokens of the same rows. Each of the dp x cp has
a copy of the dense weights: what concerns weights asks for `copies`, what concerns rows for dp.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import Literal, NamedTuple

PlatformName = Literal["auto", "cuda", "cpu"]  # what the ranks compute on; auto: see `device`
Stages = tuple[tuple[int, ...], ...]  # the layers of each pipeline stage, ascending
Group = Literal["dense", "experts"]  # of weights that are cut alike
GROUPS: tuple[Group, ...] = ("dense", "experts")


class TrainingCoordinates(NamedTuple):
    """Of a rank in a training layout."""

    tp: int
    cp: int
    dp: int
    pp: int


class RolloutCoordinates(NamedTuple):
    """Of a rank in a rollout layout."""

    replica: int
    pp: int
    tp: int


class Place(NamedTuple):
    """Which part of the weights of a group a rank holds.

    Of experts: run `ep_rank` of `ep` equal runs of whole experts, and of each of them the share `tp_rank` of `tp`.
    Of dense weights the share alone.
    """

    tp: int
    tp_rank: int
    ep: int = 1
    ep_rank: int = 0


class Cut(NamedTuple):
    """How many ranks share the weights of each group: tp, and of experts expert_tp x ep."""

    tp: int = 1
    expert_tp: int = 1
    ep: int = 1

    def places(self, group: Group) -> tuple[Place, ...]:
        """The parts that make up a copy of the weights, in the order of the ranks that hold them."""
        return _places(self, group)


@cache
def _places(cut: Cut, group: Group) -> tuple[Place, ...]:
    if group == "dense":
        return tuple(Place(cut.tp, rank) for rank in range(cut.tp))
    tp, ep = cut.expert_tp, cut.ep
    return tuple(Place(tp, i % tp, ep, i // tp) for i in range(tp * ep))


@dataclass(frozen=True)
class Layout:
    """One role's TP x CP x DP x PP over the role's ranks."""

    tp: int
    pp: int
    dp: int  # replicas that see different rows
    ranks: tuple[int, ...]  # ascending
    vpp: int = 1  # model chunks per pipeline stage (interleaved schedule)
    first_stage_layers: int | None = None  # None: alike on all stages
    last_stage_layers: int | None = None
    ep: int = 1  # runs of experts
    etp: int | None = None  # ranks that share each expert; None: see `expert_tp`
    cp: int = 1  # ranks that share the tokens of the same rows

    def __post_init__(self) -> None:
        if self.tp * self.cp * self.pp * self.dp != len(self.ranks):
            raise ValueError(f"{self._product('tp', 'cp', 'pp', 'dp')} does not fill {len(self.ranks)} ranks")
        if list(self.ranks) != sorted(set(self.ranks)):
            raise ValueError(f"ranks must ascend: {self.ranks}")
        if self.expert_tp * self.ep % self.tp or self.copies("dense") % self.dense_per_expert_copy:
            experts, own = f"{self.expert_tp} x {self.ep}", self._product("tp", "cp", "dp")
            raise ValueError(f"etp x ep = {experts} must be a multiple of tp = {self.tp} that divides {own}")

    def _product(self, *axes: str) -> str:
        named = [axis for axis in axes if axis != "cp" or self.cp > 1]
        return f"{' x '.join(named)} = {' x '.join(str(getattr(self, axis)) for axis in named)}"

    @property
    def expert_tp(self) -> int:
        """Ranks that share each expert: where it is not given, so many that the experts fill the tp ranks."""
        return expert_tensor_parallel(self.tp, self.ep, self.etp)

    @property
    def ranks_per_stage(self) -> int:
        return len(self.ranks) // self.pp

    @property
    def dense_per_expert_copy(self) -> int:
        """Copies of the dense weights, neighbours, that share one copy of the experts."""
        return self.expert_tp * self.ep // self.tp

    @property
    def cut(self) -> Cut:
        return Cut(self.tp, self.expert_tp, self.ep)

    def places(self, group: Group) -> tuple[Place, ...]:
        return self.cut.places(group)

    def place_index(self, group: Group, at: TrainingCoordinates) -> int:
        """Which of `places` the rank there holds."""
        return self.copy_index("dense", at) % self._dense_copies(group) * self.tp + at.tp

    def place(self, group: Group, at: TrainingCoordinates) -> Place:
        return self.places(group)[self.place_index(group, at)]

    def holder(self, group: Group, index: int, near: TrainingCoordinates) -> TrainingCoordinates:
        """Who holds part `index` of `places` in the copy that the rank `near` has a part of, on the stage of `near`."""
        dense, tp = divmod(index, self.tp)
        return self.at(tp, self.copy_index(group, near) * self._dense_copies(group) + dense, near.pp)

    def in_expert_copy(self, copy: int, at: TrainingCoordinates) -> TrainingCoordinates:
        """The coordinates in this copy of the experts that hold the same weights as `at`."""
        within = self.copy_index("dense", at) % self.dense_per_expert_copy
        return self.at(at.tp, copy * self.dense_per_expert_copy + within, at.pp)

    def copies(self, group: Group) -> int:
        """How many copies of the weights there are."""
        return self.dp * self.cp // self._dense_copies(group)

    def copy_index(self, group: Group, at: TrainingCoordinates) -> int:
        """Which of the copies the rank there has a part of."""
        return (at.dp * self.cp + at.cp) // self._dense_copies(group)

    def _dense_copies(self, group: Group) -> int:
        """Neighbouring copies of the dense weights on whose ranks one copy of the group lies."""
        return 1 if group == "dense" else self.dense_per_expert_copy

    def at(self, tp: int, copy: int, pp: int) -> TrainingCoordinates:
        """Who holds part `tp` of this copy of the dense weights on the stage."""
        dp, cp = divmod(copy, self.cp)
        return TrainingCoordinates(tp, cp, dp, pp)

    @cached_property
    def _index(self) -> dict[int, int]:
        return {rank: i for i, rank in enumerate(self.ranks)}

    def __contains__(self, rank: int) -> bool:
        return rank in self._index

    def rank_at(self, at: TrainingCoordinates) -> int:
        return self.ranks[((at.pp * self.dp + at.dp) * self.cp + at.cp) * self.tp + at.tp]

    def coordinates(self, rank: int) -> TrainingCoordinates:
        rest, tp = divmod(self._index[rank], self.tp)
        pp, copy = divmod(rest, self.copies("dense"))
        return self.at(tp, copy, pp)

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """The groups of ranks that differ in `axes` (tp, cp, dp, pp) alone; all ascending, every rank in one."""
        return self._groups({"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}, axes)

    def groups_of_first_rank(self) -> dict[str, list[int]]:
        """By axis; cp where ranks share tokens."""
        return {axis: list(self.groups(axis)[0]) for axis in ("tp", "pp", "cp", "dp") if axis != "cp" or self.cp > 1}

    def expert_groups(self, *axes: str) -> list[tuple[int, ...]]:
        """The same of how the experts are cut: axes are "etp", "ep", "edp" (copies of the experts), "pp"."""
        return self._groups({"pp": self.pp, "edp": self.copies("experts"), "ep": self.ep, "etp": self.expert_tp}, axes)

    def _groups(self, sizes: dict[str, int], axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """sizes: of all axes, the fastest last."""
        steps, step = {}, 1  # from a rank to the next one of an axis
        for axis in reversed(sizes):
            steps[axis], step = step, step * sizes[axis]

        def offsets(of: list[str]) -> list[int]:
            along = [range(0, sizes[axis] * steps[axis], steps[axis]) for axis in of]
            return [sum(each) for each in product(*along)]

        within = offsets([axis for axis in sizes if axis in axes])
        first = offsets([axis for axis in sizes if axis not in axes])
        return [tuple(self.ranks[i + offset] for offset in within) for i in first]

    def crosses_hosts(self, axis: Literal["tp", "cp", "copies", "pp"], ranks_per_host: int) -> bool:
        """Whether messages along an axis, or between copies of the weights, leave a host.

        A host's ranks are neighbours, the first a multiple.
        """
        hosts = [rank // ranks_per_host for rank in self.ranks]
        if axis == "pp":
            return any(own != following for own, following in zip(hosts, hosts[self.ranks_per_stage :], strict=False))
        size = {"tp": self.tp, "cp": self.tp * self.cp, "copies": self.ranks_per_stage}[axis]
        return size > 1 and any(hosts[i] != hosts[i + size - 1] for i in range(0, len(hosts), size))

    def chunks(self, num_layers: int) -> tuple[Stages, ...]:
        """chunks[stage][chunk]: layers of each model chunk. Chunk c of all stages precedes chunk c + 1 of any.

        Errors: ValueError with the arithmetic where the layers cannot be cut so.
        """
        counts = self._layers_per_chunk(num_layers)
        stages: list[list[tuple[int, ...]]] = [[] for _ in range(self.pp)]
        start = 0
        for _ in range(self.vpp):
            for stage, count in enumerate(counts):
                stages[stage].append(tuple(range(start, start + count)))
                start += count
        assert start == num_layers, f"{start} layers placed, the model has {num_layers}"
        return tuple(tuple(chunks) for chunks in stages)

    def layers_per_stage(self, num_layers: int) -> list[int]:
        """How many each pipeline stage has. Errors: as `chunks`."""
        return [count * self.vpp for count in self._layers_per_chunk(num_layers)]

    def stages(self, num_layers: int) -> Stages:
        """The layers of each pipeline stage, all chunks of the stage together."""
        return tuple(tuple(layer for chunk in chunks for layer in chunk) for chunks in self.chunks(num_layers))

    def _layers_per_chunk(self, num_layers: int) -> list[int]:
        """Layers in a chunk of each stage."""
        ends = {0: self.first_stage_layers, self.pp - 1: self.last_stage_layers}
        given = {stage: count for stage, count in ends.items() if count is not None}
        rest, open_stages = num_layers - sum(given.values()), self.pp - len(given)
        each = rest // open_stages if open_stages else 0
        if rest < 0 or each * open_stages != rest or (open_stages and each == 0):
            raise ValueError(
                f"{num_layers} layers cannot be cut into {self.pp} pipeline stages: {rest} are left for {open_stages} "
                f"equal stages" + (f" beside the stages of {sorted(given.values())}" if given else "")
            )
        counts = [given.get(stage, each) for stage in range(self.pp)]
        for stage, count in enumerate(counts):
            if count % self.vpp:
                raise ValueError(
                    f"the {count} layers of pipeline stage {stage} cannot be cut into {self.vpp} model chunks: "
                    f"{count} = {count // self.vpp} x {self.vpp} + {count % self.vpp}"
                )
        return [count // self.vpp for count in counts]


def expert_tensor_parallel(tp: int, ep: int, given: int | None) -> int:
    """Ranks that share each expert: where it is not given, so many that the experts fill the tp ranks."""
    return max(1, tp // ep) if given is None else given


@dataclass(frozen=True)
class RolloutLayout:
    """Engine replicas of pp x tp ranks: replicas[i][p * tp + t] is tensor-parallel rank t of stage p of replica i."""

    tp: int
    pp: int
    replicas: tuple[tuple[int, ...], ...]
    expert_parallel: bool = False  # a rank has whole experts, 1 / tp of them; else 1 / tp of each

    @property
    def cut(self) -> Cut:
        return Cut(self.tp, 1, self.tp) if self.expert_parallel else Cut(self.tp, self.tp)

    def place(self, group: Group, tp_rank: int) -> Place:
        """What a tensor-parallel rank holds of the weights of the rank's stage."""
        return self.cut.places(group)[tp_rank]

    @cached_property
    def _coordinates(self) -> dict[int, RolloutCoordinates]:
        return {
            rank: RolloutCoordinates(number, *divmod(i, self.tp))
            for number, replica in enumerate(self.replicas)
            for i, rank in enumerate(replica)
        }

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(self._coordinates))

    def __contains__(self, rank: int) -> bool:
        return rank in self._coordinates

    def coordinates(self, rank: int) -> RolloutCoordinates:
        return self._coordinates[rank]

    def contributes(self, rank: int) -> bool:
        """Whether this rank tells what the replica generated: the first one does."""
        return rank in self and self.coordinates(rank)[1:] == (0, 0)

    def tp_groups(self) -> list[list[int]]:
        return [list(replica[p * self.tp : (p + 1) * self.tp]) for replica in self.replicas for p in range(self.pp)]

    def pp_groups(self) -> list[list[int]]:
        return [list(replica[t :: self.tp]) for replica in self.replicas for t in range(self.tp)]
