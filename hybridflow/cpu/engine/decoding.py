"""Several decoding steps for one of vLLM's scheduler.

What vLLM 0.32.0 does around each step of the model (schedule, prepare inputs, keep books) takes as long as a
step of a small model. Between two steps in which every request decodes and none ends all that changes is one token
more of each. So the scheduler is asked for several tokens a request, as it is for drafts of speculative decoding, and
takes back those that did not come; the runner takes the steps one after the other, until a request ends. The steps, who
shares them and the tokens are those of single ones.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hybridflow.cpu.engine.decoder import repeated

if TYPE_CHECKING:  # vLLM is imported when vLLM's settings stand
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

MOST_STEPS = 16  # for one of the scheduler: whoever waits for this replica is looked for in between
DRAFT = 0  # no token is ever read from a draft


class SeveralSteps:
    """Between the scheduler and the runner of one engine, without pipeline stages, on a CPU."""

    def __init__(self, scheduler: "Scheduler", runner: Any) -> None:
        self._scheduler, self._runner = scheduler, runner
        self._their_schedule, self._their_forward = scheduler.schedule, runner._model_forward
        self._their_execute, self._their_sample = runner.execute_model, runner.sample_tokens
        self._steps = 1
        self._forward: tuple[Any, dict[str, Any]] | None = None  # the context and the inputs of the last one
        vars(scheduler)["schedule"] = self._schedule
        vars(runner).update(
            execute_model=self._execute_model, sample_tokens=self._sample_tokens, _model_forward=self._model_forward
        )

    # ---- in place of theirs

    def _schedule(self, throttle_prefills: bool = False) -> "SchedulerOutput":
        steps = steps_at_once(self._scheduler) if self._attention_is_ours() else 1
        if steps > 1:
            for request in self._scheduler.running:
                request.spec_token_ids = [DRAFT] * (steps - 1)
        return self._their_schedule(throttle_prefills)

    def _execute_model(self, scheduled: "SchedulerOutput", *args: Any, **kwargs: Any) -> Any:
        """The first step is vLLM's own."""
        drafts, sizes = scheduled.scheduled_spec_decode_tokens, scheduled.num_scheduled_tokens
        self._steps = 1 + min(map(len, drafts.values()), default=0)
        if drafts:
            assert set(sizes.values()) == {self._steps}, f"of each request {self._steps} tokens, not {sizes}"
            scheduled = dataclasses.replace(
                scheduled,
                num_scheduled_tokens=dict.fromkeys(sizes, 1),
                total_num_scheduled_tokens=len(sizes),
                scheduled_spec_decode_tokens={},
            )
        return self._their_execute(scheduled, *args, **kwargs)

    def _model_forward(self, **inputs: Any) -> Any:
        from vllm.forward_context import get_forward_context

        self._forward = get_forward_context(), inputs
        return self._their_forward(**inputs)

    def _sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = self._their_sample(*args, **kwargs)
        if self._steps > 1:
            self._go_on(output)
        self._forward = None
        return output

    # ---- the further steps

    @torch.inference_mode()
    def _go_on(self, output: "ModelRunnerOutput") -> None:
        """Add their tokens to those of the first."""
        from vllm.forward_context import override_forward_context

        assert self._forward is not None and output.logprobs is not None, "a step of the model, log-probs of its tokens"
        runner, (context, inputs), tokens = self._runner, self._forward, output.sampled_token_ids
        states = [runner.requests[name] for name in output.req_ids]
        ends = [state.sampling_params.all_stop_token_ids for state in states]
        log_probs, further = [output.logprobs], _Inputs(runner, context, inputs)
        again = repeated(runner.model.model, len(tokens))
        with override_forward_context(context):
            while len(log_probs) < self._steps and not _one_ends(tokens, ends):
                runner.input_batch.refresh_metadata()  # of logits processors that count tokens
                further.advance([own[-1] for own in tokens])
                hidden = again(inputs["input_ids"], further.longest) if again else runner.model(**inputs)
                drawn = runner._sample(runner.model.compute_logits(hidden), None)
                log_probs.append(drawn.logprobs_tensors.tolists())
                for own, state, token in zip(tokens, states, drawn.sampled_token_ids.flatten().tolist(), strict=True):
                    own.append(token)
                    state.output_token_ids.append(token)
        self._note([own[1:] for own in tokens])
        output.logprobs = _by_request(log_probs)

    def _note(self, tokens: list[list[int]]) -> None:
        """Where the runner looks for them."""
        batch, rows = self._runner.input_batch, np.arange(len(tokens))[:, None]
        new = np.array(tokens)
        at = batch.num_tokens_no_spec[rows] + np.arange(new.shape[1])
        batch.token_ids_cpu[rows, at] = new
        batch.is_token_ids[rows, at] = True
        batch.num_tokens_no_spec[: len(new)] += new.shape[1]

    def _attention_is_ours(self) -> bool:
        """vLLM's own attention plans work by the lengths of the sequences, anew in each step."""
        layers = self._runner.compilation_config.static_forward_context.values()
        return all(getattr(getattr(layer, "impl", None), "is_ours", None) for layer in layers)


class _Inputs:
    """Those of a step in the memory of the one before: each request is one token longer."""

    def __init__(self, runner: Any, context: Any, inputs: dict[str, Any]) -> None:
        self._ids, self._positions = inputs["input_ids"].numpy(), inputs["positions"].numpy()
        self._rows = np.arange(len(self._ids))
        self._tables = runner.input_batch.block_table.block_tables
        self._about = list({id(about): about for about in context.attn_metadata.values()}.values())
        lengths = {about.seq_lens.data_ptr(): about.seq_lens for about in self._about}  # groups of layers share them
        self._lengths = [each.numpy() for each in lengths.values()]

    @property
    def longest(self) -> int:
        return max(int(about.max_seq_len) for about in self._about)

    def advance(self, tokens: list[int]) -> None:
        self._ids[:] = tokens
        self._positions += 1
        for lengths in self._lengths:
            lengths += 1
        for about in self._about:
            about.max_seq_len += 1
        for table in self._tables:
            block, place = np.divmod(self._positions, table.block_size)
            blocks = table.block_table.np[self._rows, block].astype(np.int64)
            table.slot_mapping.np[self._rows] = blocks * table.block_size + place


def _one_ends(tokens: list[list[int]], ends: list[set[int]]) -> bool:
    return any(own[-1] in those for own, those in zip(tokens, ends, strict=True))


def steps_at_once(scheduler: "Scheduler") -> int:
    """How many steps are sure to come in which those that run decode, all of them, and nobody joins or has to leave."""
    running, (_, num_waiting) = scheduler.running, scheduler.get_request_counts()
    if not running or (num_waiting and len(running) < scheduler.max_num_running_reqs):
        return 1
    steps = min(MOST_STEPS, scheduler.max_num_scheduled_tokens // len(running))
    for request in running:
        params = request.sampling_params
        if request.num_tokens - request.num_computed_tokens != 1 or params is None or params.stop:
            return 1
        left = min(request.max_tokens - request.num_output_tokens, scheduler.max_model_len - request.num_tokens)
        steps = min(steps, left)
    blocks = sum(_blocks_to_come(request.num_computed_tokens, steps, scheduler.block_size) for request in running)
    return steps if blocks <= scheduler.kv_cache_manager.block_pool.get_num_free_blocks() else 1


def _blocks_to_come(num_tokens: int, more: int, block_size: int) -> int:
    """At most: some may be there from steps that did not come."""
    return (num_tokens + more - 1) // block_size - (num_tokens - 1) // block_size


def _by_request(steps: "list[LogprobsLists]") -> "LogprobsLists":
    """Those of each request side by side."""
    from vllm.v1.outputs import LogprobsLists

    def joined(parts: list[np.ndarray]) -> np.ndarray:
        return np.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])

    ids, log_probs, ranks = (joined([step[i] for step in steps]) for i in range(3))  # type: ignore[misc]
    starts = list(range(0, len(ranks), len(steps)))
    return LogprobsLists(ids, log_probs, ranks, starts)
