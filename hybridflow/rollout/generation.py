"""A batch of responses over the engine's replicas: each answers some prompts, the result is whole on every rank.

request = RolloutRequest(prompts, counts, sampling, seed=(run seed, iteration), first_prompt=0)
asked = request.prompts_of_replicas(num_replicas)
own = replica_responses(engine, params, request, asked[replica])
rollout = whole_rollout(request, own, exchange=exchange)
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hybridflow.algorithms.packed import placed
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
from hybridflow.config.sampling import SamplingConfig
from hybridflow.errors import RewardError
from hybridflow.parallel.exchange import Exchange, PartialTensor
from hybridflow.parallel.platform import preserved_random_state
from hybridflow.parallel.seeds import request_seed
from hybridflow.rollout.engine import Request, Response, RolloutEngine
from hybridflow.rollout.recorded import RecordedPiece
from hybridflow.rollout.turns import TurnTaking

if TYPE_CHECKING:  # vLLM is imported when its settings stand
    from vllm import SamplingParams


class RolloutListener(Protocol):
    """Hears of responses as they finish, on each rank of the engine replica, and may work while others generate."""

    def on_response(self, row: int, response: Response) -> None:
        """`row` of the rollout, in the order in which they finish."""

    def on_engine_step(self) -> None:
        """After each step of the engine."""

    def on_replica_done(self, prompts: Sequence[int], responses: Sequence[Response]) -> None:
        """All responses of this replica are there, prompt after prompt. Others may still run."""

    def on_failure(self) -> None:
        """This replica has failed: nobody may wait for the rest of its responses."""


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


@dataclass(frozen=True)
class RolloutRequest:
    """Which responses a rollout has: `counts` to each prompt, side by side, prompt after prompt.

    counts: int64, (prompts,). sampling: says by a prompt's length how the prompt is answered, and how long a response
    may be. seed: of the run and the iteration, and from the second time on that an iteration samples responses to the
    same prompts the number of times before. first_prompt: numbers the prompts of the run, so that a request's seed is
    (seed, prompt, sample).
    """

    prompts: PromptBatch
    counts: Tensor
    sampling: SamplingConfig
    seed: tuple[int, int] | tuple[int, int, int]
    first_prompt: int

    def prompts_of_replicas(self, num_replicas: int) -> list[list[int]]:
        return prompts_of_replicas(self.prompts, self.counts, self.sampling.limits, num_replicas)

    def of_prompts(self, own: Sequence[int]) -> tuple[list[int], list[Request]]:
        """The rows of these prompts, and what the engine is asked for each."""
        first, counts, buckets = offsets(self.counts).tolist(), self.counts.tolist(), self.sampling.buckets
        run, iteration, *again = self.seed
        rows: list[int] = []
        requests: list[Request] = []
        for prompt, ids in zip(own, self.prompts.token_lists(own), strict=True):
            rows += range(first[prompt], first[prompt] + counts[prompt])
            for sample in range(counts[prompt]):
                seed = request_seed(run, iteration, self.first_prompt + prompt, sample, *again)
                requests.append(Request(ids, seed, buckets.for_length(len(ids))))
        return rows, requests


@dataclass(frozen=True)
class RowResponses:
    """Responses, and the rows of the rollout that they are."""

    rows: Sequence[int] = ()
    responses: Sequence[Response] = ()

    def experts(self) -> dict[int, Tensor]:
        """By row, where the engine has recorded them."""
        known = zip(self.rows, self.responses, strict=True)
        return {row: response.experts for row, response in known if response.experts is not None}


@dataclass(frozen=True)
class AskedResponses:
    """of_replicas: the prompts that each engine replica answers. temperature: None: as `sampling` says. names: what
    environments know the rollout by.
    """

    request: RolloutRequest
    of_replicas: Sequence[Sequence[int]]
    temperature: float | None
    names: Sequence[int]

    def pieces(self, rollout: RolloutBatch, own: RowResponses) -> list[list[RecordedPiece]]:
        """Of the engine's experts, by row: each replica has recorded all of the rows of its prompts."""
        made_by = {prompt: replica for replica, prompts in enumerate(self.of_replicas) for prompt in prompts}
        rows = zip(rollout.prompt_indices.tolist(), rollout.lengths.tolist(), strict=True)
        experts = own.experts()
        return [[RecordedPiece(made_by[prompt], length, experts.get(row))] for row, (prompt, length) in enumerate(rows)]


def replica_responses(
    engine: RolloutEngine,
    params: "Sequence[SamplingParams]",
    request: RolloutRequest,
    own: Sequence[int],
    *,
    listener: RolloutListener | None = None,
    turns: TurnTaking | None = None,
) -> RowResponses:
    """The responses to the prompts `own` of the engine's replica. turns: of the rows, where an environment answers.

    params: one entry a bucket of prompt lengths.
    """
    rows, requests = request.of_prompts(own)
    stepped = listener.on_engine_step if listener is not None else lambda: None
    if turns is None:
        stream = engine.stream(requests, params, stepped=stepped)
    else:
        stream = turns.stream(engine, requests, rows, params, stepped=stepped)
    found: dict[int, Response] = {}
    with preserved_random_state():
        for i, response in stream:
            found[i] = response
            if listener is not None:
                listener.on_response(rows[i], response)
    responses = [found[i] for i in range(len(requests))]
    if listener is not None:
        listener.on_replica_done(own, responses)
    return RowResponses(rows, responses)


def responses_to(
    prompts: PromptBatch, asked: Sequence[int], num_samples: Tensor, responses: Sequence[Response]
) -> RolloutBatch:
    """The batch of all responses to the prompts `asked`, prompt after prompt. num_samples: of every prompt."""
    index = torch.tensor(asked, dtype=torch.int64)
    texts = tuple(prompts.texts[i] for i in asked)
    some = PromptBatch(prompts.input_ids[token_index(prompts.lengths, index)], prompts.lengths[index], texts, {})
    return joined_rollout(
        some,
        num_samples[index],
        torch.tensor([len(r.token_ids) for r in responses], dtype=torch.int64),
        torch.tensor([r.truncated for r in responses], dtype=torch.bool),
        token_ids=flat("i", (r.token_ids for r in responses)),
        log_probs=flat("f", (r.log_probs for r in responses)),
        flags=_flags(responses),
    )


def whole_rollout(
    request: RolloutRequest, own: RowResponses, *, exchange: Exchange, num_rewards: int = 0
) -> RolloutBatch:
    """Every replica's rows in one batch: collective. own: what this rank contributes; of a replica one rank does so.

    num_rewards: parts of the reward that an environment gives.
    """
    num_rows, where, responses = int(request.counts.sum()), torch.tensor(own.rows, dtype=torch.int64), own.responses

    def of_rows(values: Sequence[float], dtype: torch.dtype) -> PartialTensor:
        return PartialTensor(num_rows, where, torch.tensor(values, dtype=dtype))

    counts, truncated = exchange.gather_all(
        [
            of_rows([len(r.token_ids) for r in responses], torch.int64),
            of_rows([int(r.truncated) for r in responses], torch.int64),
        ]
    )
    at, size = token_index(counts, where), int(counts.sum())
    token_ids = exchange.gather(PartialTensor(size, at, flat("i", (r.token_ids for r in responses))))
    log_probs = exchange.gather(PartialTensor(size, at, flat("f", (r.log_probs for r in responses))))
    flags = exchange.gather(PartialTensor(size, at, _flags(responses))) if num_rewards else None
    batch = joined_rollout(
        request.prompts,
        request.counts,
        counts,
        truncated.bool(),
        token_ids=token_ids,
        log_probs=log_probs,
        flags=flags,
    )
    if not num_rewards:
        return batch
    rewards = exchange.gather_all(
        [of_rows([r.rewards[i] for r in responses], torch.float32) for i in range(num_rewards)]
    )
    return replace(batch, environment_rewards=torch.stack(rewards, dim=1))


def check_rows(rollout: RolloutBatch) -> None:
    """Errors: RewardError where no row can be trained on."""
    if rollout.failed.all():
        raise RewardError(
            f"data.environment: all {len(rollout)} rows of a rollout have failed: there is nothing to train on, "
            f"and the lines before say why"
        )


def flat(code: str, lists: Iterable[list[Any]]) -> Tensor:
    """One tensor of all numbers: `i` int32, `f` float32. No object is made for a number, as torch.tensor does."""
    found = array(code)
    for each in lists:
        found.fromlist(each)
    return torch.from_numpy(np.asarray(found))


def _flags(responses: Iterable[Response]) -> Tensor:
    """uint8, of each token."""
    return torch.from_numpy(np.asarray(bytearray().join(map(response_flags, responses)), dtype=np.uint8))


def response_flags(response: Response) -> bytearray:
    """Of each token: whether the policy chose it, and whether a branch begins with it."""
    flags = bytearray(response.sampled) if response.sampled else bytearray([SAMPLED]) * len(response.token_ids)
    for start in response.branch_starts:
        flags[start] |= BEGINS
    return flags


def joined_rollout(
    prompts: PromptBatch,
    num_samples: Tensor,
    counts: Tensor,
    truncated: Tensor,
    *,
    token_ids: Tensor,
    log_probs: Tensor,
    flags: Tensor | None = None,
    versions: Tensor | None = None,
) -> RolloutBatch:
    """Prompts and responses, packed one after the other. flags: of the responses' tokens; None: all are sampled.

    versions: of the actor that chose each of them; None: nobody asks.

    The prompt of a row whose prompt has no tokens is what comes before the first token that the policy chose.
    """
    prompt_indices = torch.arange(len(prompts)).repeat_interleave(num_samples)
    prompt_lengths = prompts.lengths[prompt_indices]
    lengths = prompt_lengths + counts
    mask = response_mask(lengths, prompt_lengths)
    behind_prompts, behind = mask, mask.numpy()
    input_ids = torch.empty(len(mask), dtype=torch.int64)
    input_ids.numpy()[behind] = token_ids.numpy()
    input_ids.numpy()[~behind] = prompts.input_ids[token_index(prompts.lengths, prompt_indices)].numpy()
    rollout_log_probs, begins = placed(log_probs, mask), torch.zeros_like(mask)
    if flags is not None:
        begins, mask = placed((flags & BEGINS) > 0, mask), placed((flags & SAMPLED) > 0, mask)
    if not prompt_lengths.all():
        prompt_lengths = torch.where(prompt_lengths > 0, prompt_lengths, tokens_before(mask, lengths))
    return RolloutBatch(
        input_ids=input_ids,
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        prompt_indices=prompt_indices,
        truncated=truncated,
        response_mask=mask,
        rollout_log_probs=rollout_log_probs,
        branch_starts=begins,
        **({} if versions is None else {"versions": placed(versions, behind_prompts)[:, None]}),
    )
