"""The process groups of grids, as each of eight ranks sees them: ranks of a fake backend, one after the other."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import pytest
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
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


# of megatron-core 0.19.2, which takes others where they are missing: for sums that travel apart, and for weights that
# are sharded and gathered at each use
MISSING = {"dp_cp_ag", "expt_dp_ag", "dp_cp_gtp_remat", "expt_dp_gtp_remat", "tp_ep_pp_with_egtp_remat"}


def test_a_group_that_was_not_made_is_an_error() -> None:
    """megatron-core 0.19.2 would answer None: a single rank, for most who ask."""
    with world_of(1):
        groups = Grid.build(LAYOUT, ProcessGroups()).groups
    with pytest.raises(AttributeError, match=r"^this grid has no process group 'dp_cp_ag'$"):
        getattr(groups, "dp_cp_ag")  # noqa: B009
    assert getattr(groups, "dp_cp_ag", None) is None and not hasattr(groups, "anything")
    assert groups.gtp_remat is None and groups.expt_gtp_remat is None


def test_every_group_that_megatron_knows_is_made_or_known_to_be_missing() -> None:
    with world_of(1):
        groups = Grid.build(EIGHT, ProcessGroups()).groups
    unset = {field.name for field in fields(ProcessGroupCollection)} - vars(groups).keys()
    assert unset <= MISSING | {"gtp_remat", "expt_gtp_remat"}
    assert {name for name, group in vars(groups).items() if group is None} == {"inter_dist_opt", "hcp"}
