"""The process groups of grids, as each of eight ranks sees them: ranks of a fake backend, one after the other."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybridflow.parallel.grid import Grid, ProcessGroups
from hybridflow.parallel.layout import Layout

NUM_RANKS = 8
LAYOUT = Layout(tp=2, pp=2, dp=1, ranks=(1, 3, 4, 6))
EIGHT = Layout(tp=2, pp=2, dp=2, ranks=tuple(range(8)))


@contextmanager
def world_of(rank: int) -> Iterator[None]:
    assert not dist.is_initialized(), "another test file has left a process group"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=NUM_RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def ranks_of(grid: Grid, *names: str) -> dict[str, list[int]]:
    return {name: dist.get_process_group_ranks(getattr(grid.groups, name)) for name in names}


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_every_rank_is_in_the_groups_of_its_layout(rank: int) -> None:
    with world_of(rank):
        grid = Grid.build(EIGHT, ProcessGroups())
        tp, dp, pp = rank % 2, rank // 2 % 2, rank // 4
        assert (grid.tp_rank, grid.dp_rank, grid.pp_rank) == (tp, dp, pp)
        assert ranks_of(grid, "tp", "dp", "pp", "mp", "tp_dp_cp", "intra_dist_opt", "embd", "cp", "dp_cp") == {
            "tp": [rank - tp, rank - tp + 1],
            "dp": [rank - 2 * dp, rank - 2 * dp + 2],
            "pp": [rank % 4, rank % 4 + 4],
            "mp": [2 * dp, 2 * dp + 1, 2 * dp + 4, 2 * dp + 5],
            "tp_dp_cp": [4 * pp, 4 * pp + 1, 4 * pp + 2, 4 * pp + 3],
            "intra_dist_opt": [0, 1, 2, 3, 4, 5, 6, 7],
            "embd": [rank % 4, rank % 4 + 4],
            "cp": [rank],
            "dp_cp": [rank - 2 * dp, rank - 2 * dp + 2],
        }
        assert (grid.groups.pos_embd is not None) == grid.is_first_stage == (rank < 4)
        assert grid.is_last_stage == (rank >= 4)
        assert grid.contributes == (rank in (4, 6))  # tp rank 0 of the last stage of each replica


@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_grid_over_some_ranks(rank: int) -> None:
    with world_of(rank):
        grid = Grid.build(LAYOUT, ProcessGroups())
        assert grid.inside == (rank in (1, 3, 4, 6))
        assert grid.contributes == (rank == 4)
        if not grid.inside:
            assert grid.coordinates is None and grid.collection is None
            with pytest.raises(AssertionError, match=rf"rank {rank} is not among the ranks \(1, 3, 4, 6\)"):
                print(grid.tp_rank)
            return
        assert ranks_of(grid, "tp", "pp", "dp") == {
            "tp": [1, 3] if rank in (1, 3) else [4, 6],
            "pp": [1, 4] if rank in (1, 4) else [3, 6],
            "dp": [rank],
        }


def test_like_groups_are_shared_between_grids() -> None:
    with world_of(1):
        groups = ProcessGroups()
        first, again = Grid.build(EIGHT, groups), Grid.build(EIGHT, groups)
        flat = Grid.build(Layout(tp=2, pp=1, dp=4, ranks=tuple(range(8))), groups)
        assert first.groups.tp is again.groups.tp is flat.groups.tp
        assert first.groups.pp is again.groups.pp and first.groups.dp is not flat.groups.dp
        assert flat.groups.intra_dist_opt is first.groups.intra_dist_opt
