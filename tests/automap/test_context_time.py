"""What ranks that share tokens send each other, by hand, in seconds of links; and which sizes a search goes over."""

from dataclasses import replace
from typing import Any

import pytest

from hybridflow.architecture.layer_kinds import DeltaSizes, LatentSizes
from hybridflow.automap.context_time import ContextWork
from hybridflow.automap.mean_rows import Pass
from hybridflow.automap.role_time import Model
from hybridflow.automap.sizes import TOKENS_OF_A_PART, context_sizes
from tests.automap.round_profile import device, small_spec

MB = Pass(tokens=10, outputs=4, pairs=500)  # of rows of 100 tokens
FREE = {"inside": {"bandwidth": 1e4, "latency": 0.0}}
LATENT = LatentSizes(None, 20, 12, 8, value_dim=12)
DELTA = DeltaSizes(key_heads=4, value_heads=8, key_dim=4, value_dim=4, kernel=4)


def work(ranks: int, tp: int = 1, **changes: Any) -> ContextWork:
    return ContextWork(small_spec(**changes), tp, ranks, 1, "float32", device(**FREE))


def links(cost: Any) -> float:
    return sum(part.seconds for part in cost.parts if part.bound == "links")


def gathered(elements: float, ranks: int) -> float:
    """Seconds in which a rank receives what it lacks of so many elements of all ranks, 4 bytes each."""
    return elements * 4 * (ranks - 1) / ranks / 1e4


def test_keys_and_values_are_gathered_and_their_gradients_summed() -> None:
    """2 key/value heads of 4 numbers: 16 a token."""
    for ranks in (2, 4):
        once = gathered(ranks * 10 * 16, ranks)
        assert links(work(ranks).forward(MB)) == pytest.approx(once)
        assert links(work(ranks).backward(MB, kept=False)) == pytest.approx(2 * once)
        assert links(work(ranks).backward(MB, kept=True)) == pytest.approx(once)
    assert links(work(2, tp=2).forward(MB)) == pytest.approx(gathered(2 * 10 * 8, 2))


def test_narrow_vectors_travel_and_every_rank_makes_heads_of_all_of_them() -> None:
    spec = {"latent": LATENT, "mixers": ("latent", "latent"), "head_dim": 20}
    assert LATENT.cached == 28
    found = work(2, **spec).forward(MB)
    assert links(found) == pytest.approx(gathered(2 * 10 * 28, 2))
    products = sum(part.seconds for part in found.parts if part.bound == "products")
    assert products == pytest.approx(2 * 10 * 20 * 2 * (12 + 12) / 1e6)  # of the other rank's tokens
    again = work(2, **spec).backward(MB, kept=False)
    assert links(again) == pytest.approx(2 * links(found))
    assert sum(part.seconds for part in again.parts if part.bound == "products") == pytest.approx(3 * products)


def test_of_windows_the_ends_of_pieces_travel() -> None:
    """4 pieces of a row of 100 tokens, of each the last 4: 16 of 100 tokens. A wide window takes all."""
    narrow = work(2, mixers=("window", "window"), sliding_window=5)
    assert links(narrow.forward(MB)) == pytest.approx(0.16 * gathered(2 * 10 * 16, 2))
    assert links(narrow.backward(MB, kept=False)) == pytest.approx(links(narrow.forward(MB)))
    wide = work(2, mixers=("window", "window"), sliding_window=90)
    assert links(wide.forward(MB)) == pytest.approx(gathered(2 * 10 * 16, 2))


def test_of_delta_nets_inputs_and_outputs_go_there_and_back() -> None:
    """Queries and keys of 16, values, gates and outputs of 32, 8 rates and decays; of half the layers."""
    found = work(2, mixers=("delta_net", "attention"), delta=DELTA)
    own = gathered(10 * (2 * 16 + 3 * 32 + 2 * 8), 2)
    assert links(found.forward(MB)) == pytest.approx(0.5 * own + 0.5 * gathered(2 * 10 * 16, 2))


def test_a_layer_has_it_once_forward_and_again_where_attention_is_computed_again() -> None:
    spec, on = small_spec(), device(**FREE)
    alone, shared = (Model(spec, 1, "float32", "lm", False, on, cp=cp) for cp in (1, 2))
    once = links(work(2).forward(MB))
    assert links(shared.forward_layer(MB)) - links(alone.forward_layer(MB)) == pytest.approx(once)
    for recompute, times in (("none", 2), ("selective", 2), ("full", 2), (("mlp",), 2)):
        more = links(shared.backward_layer(MB, recompute)) - links(alone.backward_layer(MB, recompute))
        assert more == pytest.approx(times * once), recompute


@pytest.mark.parametrize(
    ("longest", "changes", "tp", "expected"),
    [
        (2 * TOKENS_OF_A_PART - 1, {}, 1, [1]),
        (2 * TOKENS_OF_A_PART, {}, 1, [1, 2]),
        (131072, {}, 1, [1, 2, 4, 8, 16]),
        (131072, {"delta": DELTA}, 1, [1, 2, 4]),
        (131072, {"delta": DELTA}, 2, [1, 2]),
    ],
)
def test_sizes_go_by_the_longest_sequence_and_a_models_heads(
    longest: int, changes: dict, tp: int, expected: list
) -> None:
    assert context_sizes(replace(small_spec(), **changes), tp, longest) == expected
