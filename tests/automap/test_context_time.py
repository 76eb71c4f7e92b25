"""What ranks that share tokens send each other, by hand, in seconds of links; and which sizes a search goes over."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.architecture.layer_kinds import DeltaSizes, LatentSizes
from hybridflow.architecture.spec import read_spec
from hybridflow.automap.context_time import ContextWork
from hybridflow.automap.cost_tables import SAME
from hybridflow.automap.mean_rows import Pass
from hybridflow.automap.options import Options, everything
from hybridflow.automap.role_time import Model
from hybridflow.automap.sizes import TOKENS_OF_A_PART, context_sizes
from hybridflow.automap.timing import work_of
from hybridflow.config.kinds import load_config
from hybridflow.config.roles import LayoutConfig
from tests.automap.round_profile import device, small_spec
from tests.bench.long_context import SHAPES, config_of

CONFIG_FILE = "long.yaml"

MB = Pass(tokens=10, outputs=4, pairs=500)  # of rows of 100 tokens
FREE = {"inside": {"bandwidth": 1e4, "latency": 0.0}}
LATENT = LatentSizes(None, 20, 12, 8, value_dim=12)
DELTA = DeltaSizes(key_heads=4, value_heads=8, key_dim=4, value_dim=4, kernel=4)


def work(ranks: int, tp: int = 1, *, sequence_parallel: bool = False, **changes: Any) -> ContextWork:
    where = {"tp": tp, "ranks": ranks, "hosts": 1, "sequence_parallel": sequence_parallel}
    return ContextWork(small_spec(**changes), **where, dtype="float32", device=device(**FREE))


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
    # gradients of inputs and weights; the heads of both ranks' tokens are made again
    assert sum(part.seconds for part in again.parts if part.bound == "products") == pytest.approx((2 + 2) * products)
    kept = work(2, **spec).backward(MB, kept=True)
    assert sum(part.seconds for part in kept.parts if part.bound == "products") == pytest.approx(2 * products)
    # a tensor-parallel rank sends a part of the tokens, and gathers the other rank's before it makes its heads
    split = work(2, tp=2, sequence_parallel=True, **spec).forward(MB)
    assert links(split) == pytest.approx(gathered(2 * 10 / 2 * 28, 2) + gathered(10 * 20, 2))


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
        (131072, {"delta": DELTA, "mixers": ("delta_net",) * 2}, 1, [1, 2, 4]),
        (131072, {"delta": DELTA, "mixers": ("delta_net",) * 2}, 2, [1, 2]),
    ],
)
def test_sizes_go_by_the_longest_sequence_and_a_models_heads(
    longest: int, changes: dict, tp: int, expected: list
) -> None:
    assert context_sizes(replace(small_spec(), **changes), tp, longest) == expected


def options(**changes: Any) -> Options:
    """Of a GRPO run with rows of 131,072 tokens, all sizes of the actor free. changes: of the actor."""
    config = load_config(CONFIG_FILE, [f"actor.{key}={value}" for key, value in changes.items()])
    spec = replace(read_spec(config.actor.model), max_positions=1 << 20)
    free = {"actor": everything(config)["actor"], "engine": frozenset[str]()}
    work = work_of(config, device().profile)
    return Options(config, {"actor": spec}, device().profile, work=work, free=free, cuda=True)


@pytest.fixture
def long_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = SHAPES / "qwen3.5-4b"  # 16 key heads of delta nets
    Path(CONFIG_FILE).write_text(yaml.safe_dump(config_of(model, {"tensor_parallel_size": 2}, 131072, 1)))


def sizes_of(found: Options) -> set[tuple[int, int]]:
    """(tp, cp) that it goes over on 8 ranks."""
    return {(layout.tp, layout.cp) for _, layout in found._layouts("actor", 8)}


@pytest.mark.usefixtures("long_config")
def test_a_search_goes_over_what_a_run_takes() -> None:
    found = sizes_of(options())
    assert {(1, 1), (1, 8), (2, 4), (4, 2)} <= found
    assert sizes_of(options(dtype="float32")) == {(tp, cp) for tp, cp in found if cp == 1}


@pytest.mark.usefixtures("long_config")
def test_a_given_size_meets_the_heads_that_each_tensor_parallel_size_leaves() -> None:
    """Of 16 key heads 4 ranks of tp leave 4 each, which 8 ranks cannot share."""
    found = options(context_parallel_size=8, micro_batch_tokens=131072)
    found.free = {**found.free, "actor": found.free["actor"] - {"context_parallel_size"}}
    assert {layout.tp for _, layout in found._layouts("actor", 32)} == {1, 2}


def test_a_reference_that_becomes_the_actor_is_cut_alike_in_all_keys_that_a_run_compares() -> None:
    assert {*SAME} == {*LayoutConfig.model_fields} - {"data_parallel_size", "sequence_parallel", "ranks"}
