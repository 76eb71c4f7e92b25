"""Layouts by hand: where ranks stand, their groups, and the layers of stages and model chunks."""

import pytest

from hybridflow.parallel.layout import Layout, RolloutCoordinates, RolloutLayout, TrainingCoordinates

EIGHT = Layout(tp=2, pp=2, dp=2, ranks=tuple(range(8)))  # tp fastest, then dp, then pp
APART = Layout(tp=2, pp=2, dp=1, ranks=(1, 3, 4, 7))


def test_places_of_eight_ranks() -> None:
    assert [tuple(EIGHT.coordinates(rank)) for rank in range(8)] == [  # tp, cp, dp, pp
        *[(0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 1, 0), (1, 0, 1, 0)],
        *[(0, 0, 0, 1), (1, 0, 0, 1), (0, 0, 1, 1), (1, 0, 1, 1)],
    ]
    assert all(EIGHT.rank_at(EIGHT.coordinates(rank)) == rank for rank in range(8))


def test_groups_of_eight_ranks() -> None:
    assert EIGHT.groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert EIGHT.groups("dp") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert EIGHT.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert EIGHT.groups("tp", "pp") == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert EIGHT.groups("tp", "dp") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert EIGHT.groups() == [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)]
    assert EIGHT.groups("tp", "dp", "pp") == [(0, 1, 2, 3, 4, 5, 6, 7)]


def test_ranks_that_are_no_neighbours() -> None:
    assert APART.groups("tp") == [(1, 3), (4, 7)]
    assert APART.groups("pp") == [(1, 4), (3, 7)]
    assert APART.groups("dp") == [(1,), (3,), (4,), (7,)]
    assert (
        APART.coordinates(7) == TrainingCoordinates(tp=1, cp=0, dp=0, pp=1)
        and APART.rank_at(TrainingCoordinates(tp=1, cp=0, dp=0, pp=0)) == 3
    )
    assert 3 in APART and 2 not in APART


def test_axes_that_leave_a_host() -> None:
    wide = Layout(2, 2, 4, tuple(range(16)))
    assert [wide.crosses_hosts(axis, 8) for axis in ("tp", "copies", "pp")] == [False, False, True]
    assert [wide.crosses_hosts(axis, 4) for axis in ("tp", "copies", "pp")] == [False, True, True]
    assert [wide.crosses_hosts(axis, 1) for axis in ("tp", "copies", "pp")] == [True, True, True]
    assert [wide.crosses_hosts(axis, 16) for axis in ("tp", "copies", "pp")] == [False, False, False]
    shifted = Layout(1, 1, 4, (2, 3, 4, 5))
    assert shifted.crosses_hosts("copies", 4) and not shifted.crosses_hosts("copies", 8)
    assert not any(shifted.crosses_hosts(axis, 1) for axis in ("tp", "pp")), "groups of one rank"


def test_ranks_that_share_tokens_are_neighbours_with_a_copy_of_the_weights_each() -> None:
    layout, replicas = Layout(2, 2, 2, tuple(range(16)), cp=2), Layout(2, 2, 4, tuple(range(16)))
    assert [tuple(layout.coordinates(rank)) for rank in (0, 1, 2, 4, 8)] == [  # tp, cp, dp, pp
        *[(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)],
    ]
    assert all(layout.rank_at(layout.coordinates(rank)) == rank for rank in range(16))
    assert layout.groups("cp") == [(0, 2), (1, 3), (4, 6), (5, 7), (8, 10), (9, 11), (12, 14), (13, 15)]
    assert layout.groups("dp")[:3] == [(0, 4), (1, 5), (2, 6)]
    assert layout.groups("cp", "dp") == replicas.groups("dp") and layout.groups("tp", "pp") == replicas.groups(
        "tp", "pp"
    )
    assert [layout.crosses_hosts("cp", size) for size in (8, 4, 2)] == [False, False, True]
    assert (layout.copies("dense"), layout.dp) == (4, 2)
    copies = [layout.copy_index("dense", layout.coordinates(rank)) for rank in range(16)]
    assert copies == [replicas.coordinates(rank).dp for rank in range(16)]
    with pytest.raises(ValueError, match="tp x cp x pp x dp = 1 x 2 x 1 x 1 does not fill 3 ranks"):
        Layout(1, 1, 1, (0, 1, 2), cp=2)


def test_experts_lie_on_neighbouring_copies_of_the_other_weights() -> None:
    """Whatever tokens these share: three cuts of eight ranks have four copies, of which two share the experts."""
    for cp, dp in ((1, 4), (2, 2), (4, 1)):
        layout = Layout(1, 2, dp, tuple(range(8)), ep=2, cp=cp)
        at = [layout.coordinates(rank) for rank in layout.ranks]
        assert [layout.copy_index("experts", each) for each in at] == [0, 0, 1, 1, 0, 0, 1, 1]
        assert [layout.rank_at(layout.in_expert_copy(0, each)) for each in at] == [0, 1, 0, 1, 4, 5, 4, 5]
        assert [layout.rank_at(layout.in_expert_copy(1, each)) for each in at] == [2, 3, 2, 3, 6, 7, 6, 7]
        assert [layout.rank_at(layout.holder("experts", 0, each)) for each in at] == [0, 0, 2, 2, 4, 4, 6, 6]
    with pytest.raises(ValueError, match="must be a multiple of tp = 1 that divides tp x cp x dp = 1 x 2 x 1"):
        Layout(1, 1, 1, (0, 1), ep=4, cp=2)


@pytest.mark.parametrize("ranks", [(0, 1, 2), tuple(range(8))])
def test_ranks_fill_the_layout(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"tp x pp x dp = 2 x 2 x 1 does not fill {len(ranks)} ranks"):
        Layout(tp=2, pp=2, dp=1, ranks=ranks)


@pytest.mark.parametrize("ranks", [(0, 1, 2, 2), (0, 1, 3, 2)])
def test_ranks_ascend(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ranks must ascend"):
        Layout(tp=2, pp=2, dp=1, ranks=ranks)


# ------------------------------------------------------------------------------------------------ layers


def staged(pp: int, vpp: int = 1, first: int | None = None, last: int | None = None) -> Layout:
    return Layout(1, pp, 1, tuple(range(pp)), vpp, first, last)


def test_layers_of_pipeline_stages() -> None:
    assert staged(1).stages(3) == ((0, 1, 2),)
    assert staged(2).stages(4) == ((0, 1), (2, 3))
    assert staged(3, first=1).stages(5) == ((0,), (1, 2), (3, 4))
    assert staged(3, last=1).stages(5) == ((0, 1), (2, 3), (4,))
    assert staged(3, first=1, last=3).stages(6) == ((0,), (1, 2), (3, 4, 5))
    assert staged(2, first=1, last=3).stages(4) == ((0,), (1, 2, 3))


def test_layers_of_model_chunks() -> None:
    """The first chunks of all stages precede the second chunks of any."""
    layout = staged(2, vpp=2)
    assert layout.chunks(8) == (((0, 1), (4, 5)), ((2, 3), (6, 7)))
    assert layout.stages(8) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert staged(2, vpp=2, first=2).chunks(6) == (((0,), (3,)), ((1, 2), (4, 5)))
    assert staged(2).chunks(4) == (((0, 1),), ((2, 3),))


@pytest.mark.parametrize(
    ("layout", "num_layers", "message"),
    [
        (staged(2), 3, "3 layers cannot be cut into 2 pipeline stages: 3 are left for 2 equal stages"),
        (staged(4), 3, "3 layers cannot be cut into 4 pipeline stages: 3 are left for 4 equal stages"),
        (
            staged(3, first=2),
            5,
            "5 layers cannot be cut into 3 pipeline stages: 3 are left for 2 equal stages beside the stages of [2]",
        ),
        (
            staged(2, first=1, last=2),
            4,
            "4 layers cannot be cut into 2 pipeline stages: 1 are left for 0 equal stages beside the stages of [1, 2]",
        ),
        (
            staged(2, first=4),
            4,
            "4 layers cannot be cut into 2 pipeline stages: 0 are left for 1 equal stages beside the stages of [4]",
        ),
        (
            staged(2, first=5),
            4,
            "4 layers cannot be cut into 2 pipeline stages: -1 are left for 1 equal stages beside the stages of [5]",
        ),
        (
            staged(2, vpp=2),
            6,
            "the 3 layers of pipeline stage 0 cannot be cut into 2 model chunks: 3 = 1 x 2 + 1",
        ),
        (
            staged(2, vpp=2, last=1),
            3,
            "the 1 layers of pipeline stage 1 cannot be cut into 2 model chunks: 1 = 0 x 2 + 1",
        ),
    ],
)
def test_layers_that_cannot_be_cut_so(layout: Layout, num_layers: int, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        layout.chunks(num_layers)
    assert str(raised.value) == message


# ------------------------------------------------------------------------------------------------ rollout


def test_coordinates_in_engine_replicas() -> None:
    rollout = RolloutLayout(tp=2, pp=2, replicas=((1, 3, 5, 7), (8, 9, 10, 12)))
    assert rollout.ranks == (1, 3, 5, 7, 8, 9, 10, 12)
    assert rollout.coordinates(5) == RolloutCoordinates(replica=0, pp=1, tp=0)
    assert rollout.coordinates(9) == RolloutCoordinates(replica=1, pp=0, tp=1)
    assert rollout.tp_groups() == [[1, 3], [5, 7], [8, 9], [10, 12]]
    assert rollout.pp_groups() == [[1, 5], [3, 7], [8, 10], [9, 12]]
    assert [rank for rank in range(13) if rollout.contributes(rank)] == [1, 8]
    assert 12 in rollout and 11 not in rollout
