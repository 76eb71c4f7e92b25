"""Generate a batch over the engine's replicas: each its own prompts, the result whole on every rank."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from hybridflow.batch import (
    PromptBatch,
    RolloutBatch,
    balanced_partition,
    offsets,
    response_mask,
    token_index,
    tokens_before,
)
from hybridflow.config.length_buckets import LengthBuckets
from hybridflow.errors import RewardError
from hybridflow.parallel.exchange import Exchange, PartialTensor
from hybridflow.parallel.layout import RolloutLayout, Stages
from hybridflow.parallel.seeds import request_seed
from hybridflow.rollout.engine import Request, Response, RolloutEngine
from hybridflow.rollout.routing_records import Recorded, RoutingRecords
from hybridflow.rollout.turns import TurnTaking

if TYPE_CHECKING:  # vLLM is imported when its settings stand
    from vllm import SamplingParams


class RolloutListener(Protocol):
    """Is told of responses as they finish, on each rank of the engine replica, and may work while others generate."""

    def on_response(self, row: int, response: Response) -> None:
        """`row` of the rollout, in the order in which they finish."""

    def on_engine_step(self) -> None:
        """After each step of the engine."""

    def on_replica_done(self, own: RolloutBatch) -> None:
        """All rows of this replica, in their order, have finished. Others may still run."""


# An engine reads the tokens of a prompt together, and once for all samples; those of responses come one by one, each
# with a pass over the weights that only the requests of the moment share.
PROMPT_TOKENS_A_STEP = 8
SAMPLED, BEGINS = 1, 2  # of a token: the policy chose it; a branch of the row begins with it


def prompts_of_replicas(
    prompts: PromptBatch, num_samples: Tensor, limits: LengthBuckets[int], num_replicas: int
) -> list[list[int]]:
    """Which prompts each engine replica answers, ascending: nearly equal costs, and so nearly equal responses.

    num_samples: of each prompt, (prompts,); limits: on the length of a response. How long responses will be is not
    known, and by the limits is the same for every layout and every start.
    """
    steps = num_samples * torch.tensor(limits.for_lengths(prompts.lengths.tolist()), dtype=torch.int64)
    return balanced_partition((prompts.lengths + PROMPT_TOKENS_A_STEP * steps).tolist(), num_replicas)


def generate(
    engine: RolloutEngine | None,
    prompts: PromptBatch,
    params: "Sequence[SamplingParams] | None",
    *,
    samples_per_prompt: LengthBuckets[int],
    buckets: LengthBuckets[int],
    limits: LengthBuckets[int],
    seed: int,
    iteration: int,
    first_prompt: int,
    generation: int = 0,
    layout: RolloutLayout,
    rank: int,
    exchange: Exchange,
    listener: RolloutListener | None = None,
    records: RoutingRecords | None = None,
    stages: Stages = (),
    turns: TurnTaking | None = None,
    num_rewards: int = 0,
) -> RolloutBatch:
    """As many responses to each prompt as `samples_per_prompt` says, side by side, prompt after prompt.

    params: one entry a bucket; `buckets` says which of them is a prompt's, `limits` how long its responses may be.
    `first_prompt` numbers the prompts of the run, so that a request's seed is (seed, iteration, prompt, sample), and
    with them `generation`, from the second time on that an iteration samples responses to the same prompts.
    A rank without an engine waits for the others. records: take the experts that the engines have recorded, whose
    pipeline stages have these layers. turns: of this engine's rows, where an environment answers, which gives so many
    parts of a reward.
    """
    lengths = prompts.lengths.tolist()
    counts = torch.tensor(samples_per_prompt.for_lengths(lengths), dtype=torch.int64)  # of responses, (prompts,)
    asked = prompts_of_replicas(prompts, counts, limits, len(layout.replicas))
    rows: list[int] = []
    responses: list[Response] = []
    if engine is not None:
        assert params is not None, "an engine has its parameters"
        own = asked[layout.coordinates(rank).replica]
        samples = [(p, s) for p in own for s in range(int(counts[p]))]
        token_lists = prompts.token_lists()
        again = (generation,) if generation else ()
        seeds = [request_seed(seed, iteration, first_prompt + p, s, *again) for p, s in samples]
        requests = [
            Request(token_lists[p], seed, buckets.for_length(lengths[p]))
            for (p, _), seed in zip(samples, seeds, strict=True)
        ]
        first = offsets(counts).tolist()
        rows = [first[p] + s for p, s in samples]
        responses = _generated(engine, requests, params, rows, listener=listener, turns=turns)
        if listener is not None:
            listener.on_replica_done(responses_to(prompts, own, counts, responses))
    told = (rows, responses) if layout.contributes(rank) else ([], [])
    whole = _whole(prompts, counts, *told, exchange=exchange, num_rewards=num_rewards)
    if records is None:
        return whole
    made_by = {prompt: replica for replica, its in enumerate(asked) for prompt in its}
    recorded = {row: its.experts for row, its in zip(rows, responses, strict=True) if its.experts is not None}
    of_rows = [made_by[prompt] for prompt in whole.prompt_indices.tolist()]
    return records.keep(whole, Recorded(recorded, of_rows, layout, stages))


def _generated(
    engine: RolloutEngine,
    requests: list[Request],
    params: "Sequence[SamplingParams]",
    rows: list[int],
    *,
    listener: RolloutListener | None,
    turns: TurnTaking | None,
) -> list[Response]:
    """In the order of the requests, which are for these rows."""
    stepped = listener.on_engine_step if listener is not None else lambda: None
    if turns is None:
        stream = engine.stream(requests, params, stepped=stepped)
    else:
        stream = turns.stream(engine, requests, rows, params, stepped=stepped)
    responses: dict[int, Response] = {}
    for i, response in stream:
        responses[i] = response
        if listener is not None:
            listener.on_response(rows[i], response)
    return [responses[i] for i in range(len(requests))]


def responses_to(
    prompts: PromptBatch, asked: list[int], num_samples: Tensor, responses: list[Response]
) -> RolloutBatch:
    """The batch of all responses to the prompts `asked`, prompt after prompt. num_samples: of every prompt."""
    index = torch.tensor(asked, dtype=torch.int64)
    texts = tuple(prompts.texts[i] for i in asked)
    some = PromptBatch(prompts.input_ids[token_index(prompts.lengths, index)], prompts.lengths[index], texts, {})
    return _joined(
        some,
        num_samples[index],
        torch.tensor([len(r.token_ids) for r in responses], dtype=torch.int64),
        torch.tensor([r.truncated for r in responses], dtype=torch.bool),
        token_ids=torch.tensor([t for r in responses for t in r.token_ids], dtype=torch.int64),
        log_probs=torch.tensor([p for r in responses for p in r.log_probs], dtype=torch.float32),
        flags=torch.tensor([flag for r in responses for flag in _flags(r)], dtype=torch.int64),
    )


def _whole(
    prompts: PromptBatch,
    num_samples: Tensor,
    rows: list[int],
    responses: list[Response],
    *,
    exchange: Exchange,
    num_rewards: int = 0,
) -> RolloutBatch:
    """Every replica's rows in one batch. The tokens of a replica are those of its first rank."""
    num_rows, where = int(num_samples.sum()), torch.tensor(rows, dtype=torch.int64)

    def part(size: int, at: Tensor, values: Sequence[float], dtype: torch.dtype) -> PartialTensor:
        return PartialTensor(size, at, torch.tensor(values, dtype=dtype))

    counts, truncated = exchange.gather_all(
        [
            part(num_rows, where, [len(r.token_ids) for r in responses], torch.int64),
            part(num_rows, where, [int(r.truncated) for r in responses], torch.int64),
        ]
    )
    at, size = token_index(counts, where), int(counts.sum())
    token_ids = exchange.gather(part(size, at, [t for r in responses for t in r.token_ids], torch.int64))
    log_probs = exchange.gather(part(size, at, [p for r in responses for p in r.log_probs], torch.float32))
    if not num_rewards:
        return _joined(prompts, num_samples, counts, truncated.bool(), token_ids=token_ids, log_probs=log_probs)
    flags = exchange.gather(part(size, at, [flag for r in responses for flag in _flags(r)], torch.int64))
    rewards = exchange.gather_all(
        [part(num_rows, where, [r.rewards[i] for r in responses], torch.float32) for i in range(num_rewards)]
    )
    if rewards[0].isnan().all():
        raise RewardError(
            f"data.environment: all {num_rows} rows of a rollout have failed: there is nothing to train on, and the "
            f"lines before say why"
        )
    batch = _joined(
        prompts, num_samples, counts, truncated.bool(), token_ids=token_ids, log_probs=log_probs, flags=flags
    )
    return replace(batch, environment_rewards=torch.stack(rewards, dim=1))


def _flags(response: Response) -> list[int]:
    """Of each of its tokens: whether the policy chose it, and whether a branch begins with it."""
    flags = [SAMPLED * own for own in response.sampled] or [SAMPLED] * len(response.token_ids)
    for start in response.branch_starts:
        flags[start] |= BEGINS
    return flags


def _joined(
    prompts: PromptBatch,
    num_samples: Tensor,
    counts: Tensor,
    truncated: Tensor,
    *,
    token_ids: Tensor,
    log_probs: Tensor,
    flags: Tensor | None = None,
) -> RolloutBatch:
    """Prompts and responses, packed one after the other. flags: of the responses' tokens; None: all are sampled.

    The prompt of a row whose prompt has no tokens is what comes before the first token that the policy chose.
    """
    prompt_indices = torch.arange(len(prompts)).repeat_interleave(num_samples)
    prompt_lengths = prompts.lengths[prompt_indices]
    lengths = prompt_lengths + counts
    mask = response_mask(lengths, prompt_lengths)
    input_ids = torch.empty(len(mask), dtype=torch.int64)
    input_ids[mask] = token_ids
    input_ids[~mask] = prompts.input_ids[token_index(prompts.lengths, prompt_indices)]
    rollout_log_probs = torch.zeros(len(mask))
    rollout_log_probs[mask] = log_probs
    begins = torch.zeros_like(mask)
    if flags is not None:
        behind = mask.clone()
        begins[behind], mask[behind] = (flags & BEGINS) > 0, (flags & SAMPLED) > 0
    prompt_lengths = torch.where(prompt_lengths > 0, prompt_lengths, tokens_before(mask, lengths))
    shared = (input_ids, lengths, prompt_lengths, prompt_indices, truncated, mask, rollout_log_probs)
    return RolloutBatch(*shared, branch_starts=begins)
