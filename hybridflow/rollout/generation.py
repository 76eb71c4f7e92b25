"""A batch of responses over the engine's replicas: each answers some prompts, the result is whole on every rank.

request = RolloutRequest(prompts, counts, sampling, seed=(run seed, iteration), first_prompt=0)
asked = request.prompts_of_replicas(num_replicas)
own = replica_responses(engine, params, request, asked[replica])       # by row of the rollout
rollout = whole_rollout(request, own, exchange=exchange)

A rank whose engine fails says so before the exchange, and the run ends on all ranks with that error.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.algorithms.packed import scatter_masked
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
from hybridflow.errors import RewardError, Stopped
from hybridflow.parallel.agreement import raise_on_all_ranks
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.platform import preserved_random_state
from hybridflow.parallel.rank_log import IN_FILES_ALONE
from hybridflow.parallel.seeds import request_seed
from hybridflow.rollout.engine import Request, RolloutEngine
from hybridflow.rollout.recorded import RecordedPiece
from hybridflow.rollout.row import BEGINS, CUT, OF_TOKENS, SAMPLED, RolloutRow, Tensors, gathered, tensors_of
from hybridflow.rollout.turns import NewRow, TurnTaking, episodes_of

if TYPE_CHECKING:
    from vllm import SamplingParams


class RolloutListener(Protocol):
    """Hears of responses as they finish, on each rank of the engine replica, and may work while others generate."""

    def on_response(self, row: int, response: RolloutRow) -> None:
        """`row` of the rollout, in the order in which they finish."""

    def on_engine_step(self) -> None:
        """After each step of the engine."""

    def on_replica_done(self, prompts: Sequence[int], responses: Sequence[RolloutRow]) -> None:
        """All responses of this replica are there, prompt after prompt. Others may still run."""

    def on_failure(self) -> None:
        """This replica has failed: nobody may wait for the rest of its responses."""


# An engine reads the tokens of a prompt together, and once for all samples; those of responses come one by one, each
# with a pass over the weights that only the requests of the moment share.
PROMPT_TOKENS_A_STEP = 8


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
    may be. seed: (run seed, iteration), and how often before, where the iteration samples the same prompts again.
    first_prompt: the number of the first prompt in the run. A request's seed is made of `seed`, the prompt's number
    and the sample. temperature: None: as `sampling` says.
    """

    prompts: PromptBatch
    counts: Tensor
    sampling: SamplingConfig
    seed: tuple[int, int] | tuple[int, int, int]
    first_prompt: int
    temperature: float | None = None

    def prompts_of_replicas(self, num_replicas: int) -> list[list[int]]:
        return prompts_of_replicas(self.prompts, self.counts, self.sampling.limits, num_replicas)

    def of_prompts(self, own: Sequence[int]) -> dict[int, Request]:
        """What the engine is asked for each row of these prompts."""
        first, counts, buckets = offsets(self.counts).tolist(), self.counts.tolist(), self.sampling.buckets
        run, iteration, *again = self.seed
        found: dict[int, Request] = {}
        for prompt, ids in zip(own, self.prompts.token_lists(own), strict=True):
            for sample in range(counts[prompt]):
                seed = request_seed(run, iteration, self.first_prompt + prompt, sample, *again)
                found[first[prompt] + sample] = Request(ids, seed, buckets.for_length(len(ids)))
        return found

    def new_rows(self, requests: Mapping[int, Request]) -> list[NewRow]:
        """These rows where an environment answers, with what each begins with. requests: by row."""
        run, iteration, *again = self.seed
        names = (run, iteration, *(again or [0]), self.first_prompt)
        episodes, prompt_of = episodes_of(self.prompts, self.sampling.limits, names), self.prompt_indices.tolist()
        return [NewRow(request, episodes[prompt_of[row]], row) for row, request in requests.items()]

    @property
    def prompt_indices(self) -> Tensor:
        """(rows,) int64: the prompt of each row."""
        return torch.arange(len(self.prompts)).repeat_interleave(self.counts)

    def pieces(
        self, rollout: RolloutBatch, own: Mapping[int, RolloutRow], num_replicas: int
    ) -> list[list[RecordedPiece]]:
        """Of the engine's experts, by row: each replica has recorded all of the rows of its prompts."""
        of_replicas = enumerate(self.prompts_of_replicas(num_replicas))
        made_by = {prompt: replica for replica, prompts in of_replicas for prompt in prompts}
        rows = zip(rollout.prompt_indices.tolist(), rollout.lengths.tolist(), strict=True)
        return [
            [RecordedPiece(made_by[prompt], length, own[row].experts if row in own else None)]
            for row, (prompt, length) in enumerate(rows)
        ]


def replica_responses(
    engine: RolloutEngine,
    params: "Sequence[SamplingParams]",
    request: RolloutRequest,
    own: Sequence[int],
    *,
    listener: RolloutListener | None = None,
    turns: TurnTaking | None = None,
) -> dict[int, RolloutRow]:
    """The responses to the prompts `own` of the engine's replica, by row. turns: where an environment answers.

    params: one entry a bucket of prompt lengths.
    """
    stepped, requests = listener.on_engine_step if listener is not None else lambda: None, request.of_prompts(own)
    rows, found = list(requests), dict[int, RolloutRow]()
    if turns is None:
        stream = engine.stream(list(requests.values()), params, stepped=stepped)
    else:
        stream = turns.stream(engine, request.new_rows(requests), params, stepped=stepped)
    with preserved_random_state():
        for i, response in stream:
            found[rows[i]] = response
            if listener is not None:
                listener.on_response(rows[i], response)
    found = {row: found[row] for row in rows}
    if listener is not None:
        listener.on_replica_done(own, list(found.values()))
    return found


def responses_to(
    prompts: PromptBatch, asked: Sequence[int], num_samples: Tensor, responses: Sequence[RolloutRow]
) -> RolloutBatch:
    """The batch of all responses to the prompts `asked`, prompt after prompt. num_samples: of every prompt."""
    index = torch.tensor(asked, dtype=torch.int64)
    texts = tuple(prompts.texts[i] for i in asked)
    some = PromptBatch(prompts.input_ids[token_index(prompts.lengths, index)], prompts.lengths[index], texts, {})
    return joined_rollout(some, num_samples[index], tensors_of(responses, names=OF_TOKENS[:3]))


def whole_rollout(
    request: RolloutRequest, own: Mapping[int, RolloutRow], *, exchange: Exchange, num_rewards: int = 0
) -> RolloutBatch:
    """Every replica's rows in one batch: collective. own: what this rank contributes; of a replica one rank does so.

    num_rewards: parts of the reward that an environment gives.
    """
    names = OF_TOKENS[:3] if num_rewards else OF_TOKENS[:2]
    tensors = gathered(own, int(request.counts.sum()), exchange, num_rewards=num_rewards, names=names)
    return joined_rollout(request.prompts, request.counts, tensors)


def check_rows(rollout: RolloutBatch) -> None:
    """Errors: RewardError where no row can be trained on."""
    if rollout.failed.all():
        raise RewardError(
            f"data.environment: all {len(rollout)} rows of a rollout have failed: there is nothing to train on, "
            f"and the lines before say why"
        )


def joined_rollout(prompts: PromptBatch, num_samples: Tensor, rows: Tensors) -> RolloutBatch:
    """Prompts and responses, packed one after the other. rows: see `row.tensors_of`.

    Without flags the policy chose all tokens. Versions and rewards are the batch's where there are any.
    The prompt of a row whose prompt has no tokens is what comes before the first token that the policy chose.
    """
    counts, _, states = rows["rows"].unbind(1)
    prompt_indices = torch.arange(len(prompts)).repeat_interleave(num_samples)
    prompt_lengths = prompts.lengths[prompt_indices]
    lengths = prompt_lengths + counts
    mask = response_mask(lengths, prompt_lengths)
    behind_prompts, behind = mask, mask.numpy()
    input_ids = torch.empty(len(mask), dtype=torch.int64)
    input_ids.numpy()[behind] = rows["token_ids"].numpy()
    input_ids.numpy()[~behind] = prompts.input_ids[token_index(prompts.lengths, prompt_indices)].numpy()
    rollout_log_probs, further = scatter_masked(rows["log_probs"], mask), {}
    if "flags" in rows:
        flags = rows["flags"]
        further["branch_starts"] = scatter_masked((flags & BEGINS) > 0, mask)
        mask = scatter_masked((flags & SAMPLED) > 0, mask)
    if not prompt_lengths.all():
        prompt_lengths = torch.where(prompt_lengths > 0, prompt_lengths, tokens_before(mask, lengths))
    if "versions" in rows:
        further["versions"] = scatter_masked(rows["versions"], behind_prompts)[:, None]
    if "rewards" in rows and rows["rewards"].numel():
        further["environment_rewards"] = rows["rewards"]
    return RolloutBatch(
        input_ids=input_ids,
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        prompt_indices=prompt_indices,
        truncated=states == CUT,
        response_mask=mask,
        rollout_log_probs=rollout_log_probs,
        **further,
    )


LOG = logging.getLogger(__name__)
T = TypeVar("T")


def fail_together(
    generate: Callable[[], T],
    engine: RolloutEngine | None,
    group: dist.ProcessGroup,
    *,
    size: int,
    listener: RolloutListener | None = None,
) -> T | None:
    """What `generate` gives. An error of all ranks of one replica is raised on all ranks. Collective over the group.

    size: ranks of a replica. Of several only errors of what answers the model are such: all of them hear of these.
    """
    found, failure = None, None
    try:
        found = generate()
    except Exception as error:
        if isinstance(error, Stopped) or not (size == 1 or getattr(error, "of_replica", False)):
            raise
        failure = error
        LOG.error("told when all ranks have generated: %s: %s", type(error).__name__, error, extra=IN_FILES_ALONE)
        with contextlib.suppress(Exception):  # an engine that has failed may fail here too: the run ends
            if engine is not None:
                engine.abort_all()
        if listener is not None:
            listener.on_failure()
    raise_on_all_ranks(failure, group)
    return found
