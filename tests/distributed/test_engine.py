"""The engine alone: every rollout layout against HuggingFace, the KV cache asleep, one engine after the other."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridflow.cpu.kernels import library as libraries
from tests.covering import uncovered
from tests.distributed.engine_worker import CASES, KV_CACHE_GIB, MAX_LENGTH, NUM_LAYERS, NUM_PROMPTS, NUM_RANKS, REBUILD
from tests.launch import run_ranks
from tests.tiny_models import give_own_head, make_checkpoints

pytestmark = pytest.mark.distributed

KV_CACHE_BYTES = KV_CACHE_GIB * 2**30
MODELS = {
    "llama": ("llama", False, 4),
    "qwen2": ("qwen2", True, 4),
    "few_kv": ("llama", False, 2),
    "own_head": ("qwen2", True, 4),
}
DEFAULT = ("tp1", "tp2 at intervals", "pp2 apart")  # of the default set
thorough = pytest.mark.thorough


def each_case(wanted: Callable[[str], bool] = lambda name: True) -> pytest.MarkDecorator:
    names = [pytest.param(name, marks=() if name in DEFAULT else thorough) for name in CASES if wanted(name)]
    return pytest.mark.parametrize("name", names)


def is_float32(name: str) -> bool:
    return CASES[name].dtype == "float32"


def is_staged(name: str) -> bool:
    return CASES[name].pp > 1


def test_any_two_sizes_stand_together_with_a_tied_head_and_without() -> None:
    cases = [{"tied": MODELS[case.model][1], "tp": case.tp, "pp": case.pp} for case in CASES.values()]
    assert uncovered({"tied": (False, True), "tp": (1, 2), "pp": (1, 2)}, cases) == set()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("engine")
    for name, (family, tied, num_kv_heads) in MODELS.items():
        make_checkpoints(
            root / name,
            family=family,
            tied=tied,
            head_dim=32,
            num_layers=NUM_LAYERS,
            num_kv_heads=num_kv_heads,
            max_length=MAX_LENGTH,
        )
    give_own_head(root / "own_head" / "policy")
    bare = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(root / "own_head" / "policy", root / "own_head" / "without_weights", ignore=bare)
    return root


@pytest.fixture(scope="module")
def ranks(checkpoints: Path, selected) -> list[dict]:
    """What each rank saw of each case."""
    run_ranks(NUM_RANKS, "tests.distributed.engine_worker", checkpoints, checkpoints / "cases.json", *selected("name"))
    return json.loads((checkpoints / "cases.json").read_text())


@pytest.fixture(scope="module")
def rebuilds(checkpoints: Path) -> list[dict]:
    """What each rank saw of engines that are built and closed in turn."""
    run_ranks(NUM_RANKS, "tests.distributed.engine_worker", checkpoints, checkpoints / "rebuilds.json", REBUILD)
    return [results[REBUILD] for results in json.loads((checkpoints / "rebuilds.json").read_text())]


def records(ranks: list[dict], name: str) -> dict[int, dict]:
    """The records of a case by the ranks that take part in it; no other rank has one."""
    found = {rank: results[name] for rank, results in enumerate(ranks) if results[name] is not None}
    assert tuple(found) == CASES[name].layout.ranks
    return found


@each_case(is_float32)
def test_greedy_tokens_are_huggingfaces_on_every_rank(ranks, name):
    for record in records(ranks, name).values():
        assert record["right"] == [True] * NUM_PROMPTS


@each_case()
def test_a_generation_ends_when_the_device_has_nothing_more_to_do(ranks, name):
    """vLLM begins a step ahead on CUDA, on the weights that the trainer takes back."""
    assert all(record["waits"] == 1 for record in records(ranks, name).values())


@each_case()
def test_the_config_that_code_is_compiled_by_knows_the_strides_of_the_weights(ranks, name):
    assert all(record["strides_in_key"] for record in records(ranks, name).values())


@each_case(is_float32)
def test_sampled_log_probs_are_huggingfaces_on_every_rank(ranks, name):
    for record in records(ranks, name).values():
        assert record["difference"] < 1e-4


@pytest.mark.usefixtures("needs_kernels")
@each_case()
def test_layers_and_draws_in_c_give_what_vllms_own_give(ranks, name):
    """Twelve tokens, of which all but the first are few enough; layers that are cut over ranks stay vLLM's."""
    case = CASES[name]
    for rank, record in records(ranks, name).items():
        assert record["again"]
        assert record["vllms_tokens"] == record["sampled"]
        assert record["from_vllms"] < (1e-4 if case.dtype == "float32" else 0.05)
        assert record["draws"] >= 12
        own_layers = len(case.stages[case.layout.coordinates(rank).pp])
        assert (record["layer_calls"] >= 11 * own_layers) if case.tp == 1 else record["layer_calls"] == 0


@each_case(lambda name: not is_staged(name))
def test_several_steps_at_once_are_single_ones(ranks, name):
    """Tokens and log-probs to the bit, in the order in which they finish; vLLM's scheduler is asked less often.

    Twelve requests, of which eight run at once; a cache that is full has room for fewer.
    """
    for record in records(ranks, name).values():
        assert list(record["steps"]) == list(CASES[name].ways)
        for way, found in record["steps"].items():
            assert found["same"], way
        found = record["steps"]["of one length"]
        assert found["lengths"] == 12 * [24]
        assert len(set(record["steps"]["ends"]["lengths"])) > 3
        if libraries.why_not() is not None:
            assert found["steps"] == found["of_single"]
        else:
            assert found["steps"] < (1.0 if name == "full cache" else 0.4) * found["of_single"]


@each_case(lambda name: name == "bfloat16")
def test_bfloat16_responses_are_those_of_an_engine_that_vllm_loads(ranks, name):
    """Tokens and log-probs to the bit: weights cut out of a model's tensors, and vLLM's own reading of its files."""
    for record in records(ranks, name).values():
        assert record["as_vllm_loads_it"]


@each_case()
def test_ranks_of_a_replica_draw_alike(ranks, name):
    found = records(ranks, name)
    drawn = [[found[rank]["sampled"] for rank in replica] for replica in CASES[name].replicas]
    for replica in drawn:
        assert all(other == replica[0] for other in replica)
    assert all(other[0] != drawn[0][0] for other in drawn[1:])  # each replica has prompts of its own


@each_case()
def test_cache_is_released_asleep_and_back_awake(ranks, name):
    for record in records(ranks, name).values():
        awake, asleep, again = record["nbytes"]
        assert 0 < awake <= KV_CACHE_BYTES
        assert (asleep, again) == (0, awake)
        assert record["same_after_sleep"]


@each_case(is_staged)
def test_stages_have_the_layers_they_were_given(ranks, name):
    case = CASES[name]
    for rank, record in records(ranks, name).items():
        found = {int(parameter.split(".")[2]) for parameter in record["parameters"] if ".layers." in parameter}
        assert found == set(case.stages[case.layout.coordinates(rank).pp])


@each_case(lambda name: name == "own head")
def test_a_stage_with_a_head_of_its_own_has_no_embedding(ranks, name):
    for rank, record in records(ranks, name).items():
        first = CASES[name].layout.coordinates(rank).pp == 0
        assert ("model.embed_tokens.weight" in record["parameters"]) == first
        assert ("lm_head.weight" in record["parameters"]) == (not first)


@each_case()
def test_ranks_of_a_replica_have_as_many_blocks(ranks, name):
    """Each schedules for itself: with other numbers of blocks they would part when the cache is full."""
    found = records(ranks, name)
    for replica in CASES[name].replicas:
        assert len({found[rank]["blocks"] for rank in replica}) == 1


@each_case(lambda name: name == "pp2 full cache")
def test_the_full_cache_is_small(ranks, name):
    """Else that case would show nothing that the others do not."""
    assert all(record["blocks"] == 13 for record in records(ranks, name).values())


@each_case()
def test_a_closed_engine_is_gone(ranks, name):
    assert all(record["collected"] for record in records(ranks, name).values())


@thorough
def test_memory_does_not_grow_with_engines(rebuilds):
    for record in rebuilds:
        resident = record["resident"]
        assert resident[-1] - resident[1] < 16 << 20  # after one engine of each of the two kinds


@thorough
def test_cache_stays_at_sleep_level_0(rebuilds):
    for record in rebuilds:
        assert min(record["kept"]) > KV_CACHE_BYTES / 4


@thorough
def test_an_engine_that_is_closed_asleep_is_awake_when_its_memory_is_freed(rebuilds):
    assert all(record["awake_at_the_end"] for record in rebuilds)
