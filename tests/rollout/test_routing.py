"""The experts that an engine records are those that transformers chooses, token by token, whoever computed a token."""

import json
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from vllm import CompletionOutput, RequestOutput, SamplingParams
from vllm.logprobs import FlatLogprobs, Logprob

from hybridflow.batch import RolloutBatch, response_mask
from hybridflow.errors import EnvironmentProblem
from hybridflow.models.routing import RoutingSizes, replayed
from hybridflow.parallel.layout import Layout, RolloutLayout
from hybridflow.rollout.engine import Request, RolloutEngine
from hybridflow.rollout.recorded import RecordedPiece
from hybridflow.rollout.routing import ReturnedRouting
from hybridflow.rollout.routing_records import RoutingRecords
from tests.launch import run_ranks
from tests.rollout.responses import responses_of
from tests.rollout.routing_worker import CASES, MAX_LENGTH, NUM_LAYERS, NUM_RANKS
from tests.rollout.simulated_exchange import SimulatedExchange, SimulatedGroup
from tests.tiny_models import make_checkpoints

DEFAULT = ("shared prompts", "stages")
each_case = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.thorough) for name in CASES]
)


@pytest.fixture(scope="module")
def results(selected, tmp_path_factory) -> list[dict]:
    root = tmp_path_factory.mktemp("routing")
    names = sorted(selected("name"))
    for family in sorted({CASES[name].family for name in names}):
        make_checkpoints(
            root / family, family=family, tied=False, head_dim=32, num_layers=NUM_LAYERS, max_length=MAX_LENGTH
        )
    run_ranks(NUM_RANKS, "tests.rollout.routing_worker", root, root / "results.json", *names)
    return json.loads((root / "results.json").read_text())


@pytest.mark.distributed
@each_case
def test_they_are_those_that_transformers_chooses(name: str, results: list[dict]) -> None:
    case = CASES[name]
    for rank, found in enumerate(found[name] for found in results):
        num_requests = len(case.prompt_lengths) * case.samples
        if rank and case.tp > 1:
            assert found["told"] == 0, "the first tensor-parallel rank tells them"
            continue
        assert found["told"] == num_requests and found["different"] == 0 and found["total"] > 0, found
        if case.samples > 1:
            has_states = case.family == "qwen3_5_moe"
            assert (found["cached"] == 0) == has_states, "some prompts come from the cache"
        assert (found["preempted"] > 0) == (name == "full cache"), "what was computed again"
        most, preemptions = found["cache_use"]
        assert preemptions == found["preempted"] and found["cache_use_again"] == [0.0, 0]
        assert most == 1 if name == "full cache" else 0 < most < 1, most


# ------------------------------------------------------------------------------------------------ V2


def returned(experts: np.ndarray | None) -> SimpleNamespace:
    return SimpleNamespace(routed_experts=experts)


@pytest.mark.parametrize(("num_experts", "dtype", "ours"), [(128, "uint8", torch.uint8), (512, "uint16", torch.uint16)])
def test_what_the_newer_runner_returns(num_experts: int, dtype: str, ours: torch.dtype) -> None:
    """vLLM's is simulated: V2 needs Triton."""
    experts = np.random.default_rng(0).integers(0, num_experts, (5, 3, 2)).astype(dtype)
    found = ReturnedRouting(RoutingSizes(3, 2, num_experts)).experts("0-a", returned(experts), 5)
    assert found.dtype == ours and found.tolist() == experts.tolist()
    assert found.data_ptr() == experts.ctypes.data, "vLLM's own memory"


def test_routes_in_another_type_are_not_converted() -> None:
    experts = np.zeros((5, 3, 2), "int32")
    with pytest.raises(EnvironmentProblem, match="routed experts in torch\\.int32, expected torch\\.uint8"):
        ReturnedRouting(RoutingSizes(3, 2, 128)).experts("0-a", returned(experts), 5)


def test_what_the_newer_runner_returns_comes_with_a_response_and_into_the_batch() -> None:
    """Two requests, which finish in the other order."""
    sizes, experts = RoutingSizes(3, 2, 128), np.arange(2 * 5 * 3 * 2, dtype="uint8").reshape(2, 5, 3, 2)
    engine, prompts = object.__new__(RolloutEngine), ([5, 6], [7, 8, 9])
    finished = [output("1", [4, 3, 2], experts[1]), output("0", [4, 4], experts[0, :3])]
    engine._routing, engine._platform, engine._engine = ReturnedRouting(sizes), mock.MagicMock(), mock.MagicMock()
    engine._engine.has_unfinished_requests.side_effect = [True, True, False]
    engine._engine.step.side_effect = [[each] for each in finished]
    requests = [Request(prompt, seed=0) for prompt in prompts]
    responses = responses_of(engine, requests, [SamplingParams()])
    assert [response.experts.tolist() for response in responses] == [experts[0, :3].tolist(), experts[1].tolist()]
    ids = [*prompts[0], 4, 4, *prompts[1], 4, 3, 2]
    exchange: Any = SimulatedExchange(SimulatedGroup([0], {}), 0)
    layout, engines = Layout(1, 1, 1, (0,)), (RolloutLayout(1, 1, ((0,),)), ((0, 1, 2),))
    records = RoutingRecords(sizes, layout, rank=0, world=exchange, replicas=exchange, engines=engines)
    pieces = [[RecordedPiece(0, length, its.experts)] for length, its in zip([4, 6], responses, strict=True)]
    kept = records.add(batch_of(ids, [4, 6]), pieces, 1)
    found = records.of_rows(kept, [0, 1]).for_tokens(torch.arange(10)).experts
    assert found[[3, 9]].sum() == 0 and found[:3].tolist() == experts[0, :3].tolist()
    assert found[4:9].tolist() == experts[1].tolist()


def output(name: str, token_ids: list[int], experts: np.ndarray) -> RequestOutput:
    log_probs = FlatLogprobs()
    for token in token_ids:
        log_probs.append({token: Logprob(-1.0)})
    completion = CompletionOutput(0, "", token_ids, None, log_probs, routed_experts=experts, finish_reason="length")
    return RequestOutput(name, None, None, None, [completion], finished=True)


def batch_of(ids: list[int], lengths: list[int]) -> RolloutBatch:
    rows, prompts = torch.arange(len(lengths)), torch.tensor([2, 3])
    mask = response_mask(torch.tensor(lengths), prompts)
    ended = torch.zeros(len(lengths), dtype=torch.bool)
    return RolloutBatch(torch.tensor(ids), torch.tensor(lengths), prompts, rows, ended, mask, torch.zeros(len(ids)))


@pytest.mark.parametrize("experts", [None, np.zeros((4, 3, 2), "uint8")])
def test_a_token_without_experts_is_no_rounding_error(experts: np.ndarray | None) -> None:
    with pytest.raises(EnvironmentProblem, match="expected \\(5, 3, 2\\)"):
        ReturnedRouting(RoutingSizes(3, 2, 128)).experts("0-a", returned(experts), 5)


def test_without_a_record_the_own_choice_stands() -> None:
    own, engines = torch.tensor([[3, 1], [0, 2], [1, 0]]), torch.tensor([[0, 1], [0, 0], [255, 254]], dtype=torch.uint8)
    assert replayed(own, engines).tolist() == [[0, 1], [0, 2], [255, 254]]
