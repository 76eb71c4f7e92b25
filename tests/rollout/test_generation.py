"""How prompts are dealt out to the replicas of the engine."""

import pytest
import torch
from vllm import CompletionOutput, RequestOutput, SamplingParams
from vllm.logprobs import FlatLogprobs

from hybridflow.batch import PromptBatch
from hybridflow.config import SamplingConfig
from hybridflow.config.length_buckets import LengthBuckets, always
from hybridflow.parallel.platform import Platform
from hybridflow.rollout import engine as engine_module
from hybridflow.rollout.engine import RolloutEngine
from hybridflow.rollout.generation import RolloutRequest, prompts_of_replicas, replica_responses, responses_to
from hybridflow.rollout.row import CUT, ENDED, SAMPLED, RolloutRow


def prompts(lengths: list[int]) -> PromptBatch:
    return PromptBatch(torch.zeros(sum(lengths), dtype=torch.int64), torch.tensor(lengths), ("",) * len(lengths), {})


def mixed(seed: int) -> list[int]:
    """Of 64 prompts every eighth is of some thousand tokens, in any order."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(32, 257, (64,), generator=generator)
    lengths[::8] = torch.randint(2048, 4097, (8,), generator=generator)
    return lengths[torch.randperm(64, generator=generator)].tolist()


@pytest.mark.parametrize("lengths", [[4096] * 4 + [64] * 60, *map(mixed, range(3))], ids=["four long", *"abc"])
@pytest.mark.parametrize("num_samples", [4, 8])
def test_replicas_give_nearly_as_many_responses(lengths: list[int], num_samples: int) -> None:
    """At most 1.2 times as many, however long prompts are; by the tokens of prompts alone it was 15 times."""
    counts = torch.full((64,), num_samples)
    shares = prompts_of_replicas(prompts(lengths), counts, always(1024), 8)
    responses = [int(counts[share].sum()) for share in shares]
    assert sorted(prompt for share in shares for prompt in share) == list(range(64))
    assert max(responses) <= 1.2 * min(responses)


def test_responses_that_may_be_longer_count_more() -> None:
    """Eight short limits beside a long one: 8 x 100 x 8 + 8 x 10 against 800 x 8 + 100."""
    limits = LengthBuckets((10,), (100, 800))
    shares = prompts_of_replicas(prompts([10] * 8 + [100]), torch.ones(9, dtype=torch.int64), limits, 2)
    assert shares == [[8], [0, 1, 2, 3, 4, 5, 6, 7]]


def test_prompts_that_are_much_longer_than_their_responses_count() -> None:
    limits = always(1)
    shares = prompts_of_replicas(prompts([1000, 8, 8, 8]), torch.ones(4, dtype=torch.int64), limits, 2)
    assert shares == [[0], [1, 2, 3]]


def test_a_row_brings_its_prompt_where_that_has_no_tokens() -> None:
    """The prompt is what stands before the first token of the policy; all of a row that has none, as it has failed."""
    responses = [
        RolloutRow([1, 2, 3, 4, 5], [0.0, 0.0, -0.3, 0.0, -0.5], bytearray([0, 0, SAMPLED, 0, SAMPLED]), state=ENDED),
        RolloutRow([6, 7], [0.0, -0.7], bytearray([0, SAMPLED]), state=CUT),
        RolloutRow([8], [0.0], bytearray([0]), state=ENDED),
    ]
    batch = responses_to(prompts([0, 0]), [0, 1], torch.tensor([2, 1]), responses)
    assert batch.input_ids.tolist() == list(range(1, 9)) and batch.lengths.tolist() == [5, 2, 1]
    assert batch.prompt_lengths.tolist() == [2, 1, 1] and batch.prompt_indices.tolist() == [0, 0, 1]
    assert batch.response_mask.tolist() == [False, False, True, False, True, False, True, False]
    assert batch.truncated.tolist() == [False, True, False]
    assert torch.equal(batch.rollout_log_probs, torch.tensor([0.0, 0.0, -0.3, 0.0, -0.5, 0.0, -0.7, 0.0]))


def test_a_prompt_that_is_known_ends_where_it_ends() -> None:
    """Also where somebody else writes first behind that prompt."""
    responses = [RolloutRow([3, 4], [0.0, -0.4], bytearray([0, SAMPLED]), state=ENDED)]
    batch = responses_to(prompts([2]), [0], torch.tensor([1]), responses)
    assert batch.prompt_lengths.tolist() == [2] and batch.response_mask.tolist() == [False, False, False, True]


class Drawing:
    """vLLM's engine as far as it is asked: a step draws from torch's global generator, as the older runner may."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, SamplingParams]] = []
        self.left = 0
        self.drawn: list[float] = []

    def add_request(self, name: str, prompt: dict, params: SamplingParams) -> str:
        self.asked.append((name, params))
        self.left += 1
        return f"{name}-of-vLLM"

    def has_unfinished_requests(self) -> bool:
        return self.left > 0

    def step(self) -> list[RequestOutput]:
        """One request ends, another goes on."""
        self.drawn.append(float(torch.rand(())))
        self.left -= 1
        log_probs = FlatLogprobs(start_indices=[0], end_indices=[1], token_ids=[5], logprobs=[-0.5])
        output = CompletionOutput(0, "", [5], None, log_probs, finish_reason="length")
        common = dict(prompt=None, prompt_token_ids=[1], prompt_logprobs=None, outputs=[output])
        return [RequestOutput("9", finished=False, **common), RequestOutput(str(self.left), finished=True, **common)]


def test_a_rollout_leaves_torchs_random_state_and_copies_parameters_once() -> None:
    """The state is saved once for all steps, and a request's own seed is the request's alone."""
    engine = RolloutEngine.__new__(RolloutEngine)
    engine._engine, engine._routing, engine._platform = Drawing(), None, Platform(torch.device("cpu"), 0, 0, 1)
    sampling = SamplingConfig(max_response_length=1)
    params = engine_params(sampling)
    counts = torch.full((2,), 2)
    request = RolloutRequest(prompts([1, 1]), counts, sampling, seed=(1, 1), first_prompt=0)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = replica_responses(engine, [params], request, [0, 1])
    assert torch.equal(torch.get_rng_state(), before)
    assert len(set(engine._engine.drawn)) == 4  # the state goes on from step to step
    assert [row.token_ids for row in found.values()] == [[5]] * 4
    asked = [own for _, own in engine._engine.asked]
    assert len({own.seed for own in asked}) == 4 and params.seed is None
    assert all(own.stop_token_ids is params.stop_token_ids for own in asked)


def engine_params(sampling: SamplingConfig) -> SamplingParams:
    return engine_module._sampling_params(sampling, (2,), needs_text=False, temperature=1.0)
