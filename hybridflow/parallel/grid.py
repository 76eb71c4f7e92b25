"""A grid of ranks, TP x PP x DP, and its process groups: the only user of megatron's group machinery.

Ranks are numbered with tp fastest, then dp, then pp: tp neighbours share a node. Every role has its own grid; several
grids may lie over the same ranks. Nothing is written into megatron's global parallel state.
"""

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.process_groups_config import ProcessGroupCollection

from hybridflow.errors import ConfigError


@dataclass(frozen=True)
class Grid:
    """One role's layout as this rank sees it. `build` is collective over the world."""

    tp: int
    pp: int
    dp: int
    ranks: tuple[int, ...]
    groups: ProcessGroupCollection | None  # None on a rank outside the grid

    @classmethod
    def build(cls, tp: int, pp: int, dp: int) -> "Grid":
        """The grid over all ranks of the world; every rank calls this in the same order."""
        world_size = dist.get_world_size()
        if tp * pp * dp != world_size:
            raise ConfigError(f"a grid of tp x pp x dp = {tp} x {pp} x {dp} does not fill {world_size} ranks")
        return cls(tp, pp, dp, tuple(range(world_size)), _process_groups(tp, pp, dp))

    @property
    def tp_rank(self) -> int:
        return self._member.tp.rank()

    @property
    def pp_rank(self) -> int:
        return self._member.pp.rank()

    @property
    def dp_rank(self) -> int:
        return self._member.dp.rank()

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    @property
    def speaks(self) -> bool:
        """Whether this rank contributes its replica's results to an exchange: one rank of each replica does."""
        return self.groups is not None and self.tp_rank == 0 and self.is_last_stage

    @property
    def _member(self) -> ProcessGroupCollection:
        assert self.groups is not None, f"rank {dist.get_rank()} is not in the grid of ranks {self.ranks}"
        return self.groups

    def tp_rank_lists(self) -> list[list[int]]:
        """The tensor-parallel groups, each ascending."""
        return [list(self.ranks[i : i + self.tp]) for i in range(0, len(self.ranks), self.tp)]


def _process_groups(tp: int, pp: int, dp: int) -> ProcessGroupCollection:
    grid = HyperCommGrid([tp, 1, dp, pp], ["tp", "cp", "dp", "pp"])
    groups = ProcessGroupCollection()
    groups.tp, groups.cp, groups.dp, groups.pp = (grid.create_pg(name) for name in ("tp", "cp", "dp", "pp"))
    groups.mp = groups.tp_ep_pp = grid.create_pg(["tp", "pp"])
    groups.dp_cp = groups.intra_dp_cp = grid.create_pg(["cp", "dp"])
    groups.tp_cp = grid.create_pg(["tp", "cp"])
    groups.tp_dp_cp = grid.create_pg(["tp", "cp", "dp"])
    groups.intra_dist_opt = grid.create_pg(["tp", "cp", "dp", "pp"])
    # one expert, no context parallelism: their groups are the dense ones
    groups.expt_tp = groups.tp_ep = groups.tp
    groups.ep = groups.cp
    groups.expt_dp = groups.intra_expt_dp = groups.dp
    groups.inter_dist_opt = groups.hcp = None
    groups.embd, groups.pos_embd = _embedding_groups(grid)
    return groups


def _embedding_groups(grid: HyperCommGrid) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """(first and last stage, first stage) of this rank's pipeline: where tied and position embeddings live."""
    rank, embedding, position = dist.get_rank(), None, None
    for pipeline in grid.get_rank_enum("pp"):
        ends = sorted({pipeline[0], pipeline[-1]})
        ends_group, first_group = dist.new_group(ends), dist.new_group(pipeline[:1])
        embedding = ends_group if rank in ends else embedding
        position = first_group if rank == pipeline[0] else position
    return embedding, position
