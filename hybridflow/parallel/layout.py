"""Where ranks stand, without any process group: training layouts TP x PP x DP and rollout layouts. Pure.

Ranks of a layout are numbered with tp fastest, then dp, then pp: tp neighbours share a node, pipeline stages lie far
apart. What a rank holds follows from its coordinates alone, on every rank alike, and so does every plan.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal, NamedTuple

PlatformName = Literal["auto", "cuda", "cpu"]  # what the ranks compute on; auto: see `device`
Stages = tuple[tuple[int, ...], ...]  # the layers of each pipeline stage, ascending


class TrainingCoordinates(NamedTuple):
    """Of a rank in a training layout."""

    tp: int
    dp: int
    pp: int


class RolloutCoordinates(NamedTuple):
    """Of a rank in a rollout layout."""

    replica: int
    pp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """One role's TP x PP x DP over its ranks."""

    tp: int
    pp: int
    dp: int
    ranks: tuple[int, ...]  # ascending
    vpp: int = 1  # model chunks per pipeline stage (interleaved schedule)
    first_stage_layers: int | None = None  # None: alike on all stages
    last_stage_layers: int | None = None

    def __post_init__(self) -> None:
        assert self.tp * self.pp * self.dp == len(self.ranks), (
            f"tp x pp x dp = {self.tp} x {self.pp} x {self.dp} does not fill {len(self.ranks)} ranks"
        )
        assert list(self.ranks) == sorted(set(self.ranks)), f"ranks must ascend: {self.ranks}"

    @cached_property
    def _index(self) -> dict[int, int]:
        return {rank: i for i, rank in enumerate(self.ranks)}

    def __contains__(self, rank: int) -> bool:
        return rank in self._index

    def rank_at(self, at: TrainingCoordinates) -> int:
        return self.ranks[(at.pp * self.dp + at.dp) * self.tp + at.tp]

    def coordinates(self, rank: int) -> TrainingCoordinates:
        rest, tp = divmod(self._index[rank], self.tp)
        pp, dp = divmod(rest, self.dp)
        return TrainingCoordinates(tp, dp, pp)

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """The groups of ranks that differ in `axes` ("tp", "dp", "pp") alone; all ascending, every rank in one."""
        steps = {"pp": self.dp * self.tp, "dp": self.tp, "tp": 1}  # from a rank to the next one of an axis

        def offsets(of: list[str]) -> list[int]:
            along = [range(0, getattr(self, axis) * steps[axis], steps[axis]) for axis in of]
            return [sum(each) for each in product(*along)]

        within = offsets([axis for axis in steps if axis in axes])
        first = offsets([axis for axis in steps if axis not in axes])
        return [tuple(self.ranks[i + offset] for offset in within) for i in first]

    def crosses_hosts(self, axis: Literal["tp", "dp", "pp"], ranks_per_host: int) -> bool:
        """Whether messages along an axis leave a host; a host's ranks are neighbours, its first a multiple of them."""
        hosts = [rank // ranks_per_host for rank in self.ranks]
        stage = self.tp * self.dp
        if axis == "pp":
            return any(own != following for own, following in zip(hosts, hosts[stage:], strict=False))
        size = self.tp if axis == "tp" else stage
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
        """The layers of each pipeline stage, all its chunks together."""
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


@dataclass(frozen=True)
class RolloutLayout:
    """Engine replicas of pp x tp ranks: replicas[i][p * tp + t] is tensor-parallel rank t of stage p of replica i."""

    tp: int
    pp: int
    replicas: tuple[tuple[int, ...], ...]

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
        """Whether this rank tells what its replica generated: the first one does."""
        return rank in self and self.coordinates(rank)[1:] == (0, 0)

    def tp_groups(self) -> list[list[int]]:
        return [list(replica[p * self.tp : (p + 1) * self.tp]) for replica in self.replicas for p in range(self.pp)]

    def pp_groups(self) -> list[list[int]]:
        return [list(replica[t :: self.tp]) for replica in self.replicas for t in range(self.tp)]
