"""A vLLM engine in this process that generates with the actor's own weight memory.

Each replica of the rollout layout (pp x tp ranks) generates rows of the batch. Every request has a seed, so that
what is drawn depends neither on which other requests share a step nor on how many replicas there are. On CPUs that is
all; on GPUs both change the order of sums, and so, now and then, a token.
"""

import gc
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from torch import Tensor

from hybridflow.config import RolloutConfig, SamplingConfig
from hybridflow.errors import EnvironmentProblem
from hybridflow.models.routing import RoutingSizes
from hybridflow.parallel.layout import RolloutLayout, Stages
from hybridflow.parallel.platform import Platform, preserved_random_state
from hybridflow.rollout.adapters import EngineAdapters
from hybridflow.rollout.cache import CacheUse
from hybridflow.rollout.device import engine_device
from hybridflow.rollout.language_model import LanguageModel
from hybridflow.rollout.patches import prepare_vllm, without_bars
from hybridflow.rollout.routing import ReturnedRouting, RoutingRecorder, SlotRecorder
from hybridflow.rollout.row import CUT, ENDED, RolloutRow
from hybridflow.rollout.runner import choose_runner

if TYPE_CHECKING:  # vLLM is imported when its settings stand
    from vllm import CompletionOutput, RequestOutput, SamplingParams


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    seed: int
    bucket: int = 0  # of prompt lengths: whose parameters are the request's
    num_before: int = 0  # tokens of the response that the prompt ends with


class RolloutEngine:
    """The engine over `source`, the actor's memory by engine parameter name (in the engine's layout while it runs).

    A rank of `layout` builds it when all ranks have joined the groups of that layout (`patches.join_groups`, with the
    same `stages`). All ranks of a replica are given the same requests, and each gets every token and log-prob: the last
    pipeline stage hands the logits to the others, and all draw alike from the requests' seeds. A second engine may be
    built when the first is closed.

    language_model: what vLLM has to be told of the model.
    routing: the engine records the experts of each token; only the first tensor-parallel rank of a stage tells them.
    block_tokens: of the KV cache, where it is the trainer that says it.
    adapters: of the actor; the source has their matrices too.
    """

    def __init__(
        self,
        model: Path,
        source: Callable[[str], Tensor],
        *,
        dtype: Literal["float32", "bfloat16"],
        language_model: LanguageModel,
        layout: RolloutLayout,
        stages: Stages,
        max_length: int,
        sampling: SamplingConfig,
        config: RolloutConfig,
        kv_cache_bytes: int,
        block_tokens: int,
        platform: Platform,
        routing: RoutingSizes | None = None,
        adapters: EngineAdapters | None = None,
    ) -> None:
        prepare_vllm()
        import vllm
        from vllm.triton_utils import HAS_TRITON

        from hybridflow.rollout.loader import LOAD_FORMAT

        device = language_model.prepared(engine_device())
        cuts = routing is not None and config.partial is not None
        second = choose_runner(sampling, cuda=device.kind == "cuda", triton=HAS_TRITON, pp=layout.pp, cuts_routes=cuts)
        hooked = routing is not None and not second  # a graph would not call the hooks
        self._platform, self._needs_text = platform, bool(sampling.stop or sampling.bad_words)
        self._sleeps, self._most_rows, started = config.sleep_level == 1, config.most_sequences, time.perf_counter()
        settings = device.settings(eager=config.enforce_eager or hooked, sleeps=self._sleeps, block_tokens=block_tokens)
        with preserved_random_state(), without_bars():
            self._llm = vllm.LLM(
                model=str(model),
                config_format="hf",  # some directories have another config beside config.json
                load_format=LOAD_FORMAT,
                model_loader_extra_config={"source": source, "adapters": adapters},
                dtype=dtype,
                skip_tokenizer_init=not self._needs_text,
                tensor_parallel_size=layout.tp,
                enable_expert_parallel=layout.expert_parallel and layout.tp > 1,
                pipeline_parallel_size=layout.pp,
                distributed_executor_backend="external_launcher",
                max_model_len=max_length,
                max_num_seqs=self._most_rows,
                max_num_batched_tokens=config.batched_tokens(max_length, cuda=device.kind == "cuda"),
                kv_cache_memory_bytes=kv_cache_bytes,
                enable_return_routed_experts=routing is not None and second,
                logprobs_mode="processed_logprobs",  # of the distribution that was sampled from
                generation_config="vllm",  # sampling is what the experiment's config says, nothing else
                seed=0,
                **language_model.arguments(device.kind, prefix_caching=config.enable_prefix_caching),
                **with_given(settings, config.engine_arguments.given()),
            )
        self._engine, self.build_seconds = self._llm.llm_engine, time.perf_counter() - started
        self.kv_cache, self.cache_use = device.kv_cache(self._llm), CacheUse(self._llm)
        _check_stage(self._model_runner(), stages, layout.coordinates(platform.rank).pp)
        device.finish(self._llm, pp=layout.pp)
        self._routing = self._recorder(routing if layout.coordinates(platform.rank).tp == 0 else None, hooked=hooked)

    def _recorder(self, routing: RoutingSizes | None, *, hooked: bool) -> RoutingRecorder | None:
        if routing is None:
            return None
        return SlotRecorder(self._model_runner(), routing) if hooked else ReturnedRouting(routing)

    def close(self) -> None:
        """Free what the engine holds: cache, buffers, references to the trainer's memory. The groups stay.

        Awake: CUDA's allocator of vLLM 0.32.0 unmaps memory that it frees, and in sleep it has unmapped it already.
        """
        self.wake_up()
        runner = self._model_runner()
        runner._cleanup_profiling_kv_cache = runner.kv_caches.clear  # vLLM's collects garbage, too early to find much
        self._routing = None
        self._engine.engine_core.shutdown()
        del self._llm, self._engine, self.kv_cache, self.cache_use
        gc.unfreeze()
        gc.collect()  # the engine refers to itself

    def sleep(self) -> None:
        """Release the KV cache where sleep_level asks for it. No request may be running."""
        if self._sleeps:
            self.kv_cache.release()

    def wake_up(self) -> None:
        """Take the KV cache back. What was in it is gone: reset_prefix_cache must follow before generation."""
        if self._sleeps:
            self.kv_cache.restore()

    def reset_prefix_cache(self) -> None:
        """Forget keys and values of earlier weights; must follow every reshard and every wake_up."""
        was_reset = self._llm.reset_prefix_cache()
        assert was_reset, "the prefix cache cannot be reset while requests run"

    def graph_sizes(self) -> tuple[int, ...]:
        """Tokens of a step for which there is a CUDA graph, ascending; of an engine without graphs none."""
        compilation = self._engine.vllm_config.compilation_config
        sizes = compilation.cudagraph_capture_sizes or ()
        return () if compilation.cudagraph_mode is None or compilation.cudagraph_mode.name == "NONE" else tuple(sizes)

    def notes(self) -> list[str]:
        """Lines for people on how the engine computes."""
        lines = engine_device().notes(self._model_runner().model)
        if sizes := self.graph_sizes():
            lines.append(
                f"built the engine in {self.build_seconds:.0f} s, with {len(sizes)} sizes of CUDA graphs, of "
                f"{min(sizes)} to {max(sizes)} tokens a step, and at most {self.most_rows} sequences"
            )
        return lines

    def parameters(self) -> dict[str, Tensor]:
        """The engine's parameters by vLLM's names."""
        return dict(self._model_runner().model.named_parameters())

    def _model_runner(self) -> Any:
        return self._engine.model_executor.driver_worker.worker.model_runner

    def sampling_params(self, sampling: SamplingConfig, eos_token_ids: tuple[int, ...]) -> "list[SamplingParams]":
        """vLLM's parameters for this config, one entry a bucket of prompt lengths and one for longer prompts.

        A response ends at any of `eos_token_ids` unless ignore_eos.
        """
        return [
            _sampling_params(own, eos_token_ids, needs_text=self._needs_text, temperature=own.temperature)
            for own in sampling.sections()
        ]

    def params_at(
        self, temperature: float, sampling: SamplingConfig, eos_token_ids: tuple[int, ...]
    ) -> "list[SamplingParams]":
        """The same at this temperature in all buckets; 0 takes the likeliest token always."""
        return [
            _sampling_params(own, eos_token_ids, needs_text=self._needs_text, temperature=temperature)
            for own in sampling.sections()
        ]

    def stream(
        self,
        requests: list[Request],
        params: "Sequence[SamplingParams]",
        *,
        stepped: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[int, RolloutRow]]:
        """(index, response) of each request, in the order in which they finish. params: by bucket.

        stepped: called after each step of the engine.
        """
        names = [
            self.add(str(i), request, params[request.bucket], max_tokens=None) for i, request in enumerate(requests)
        ]
        while self.is_busy:
            for output in self.step():
                number = int(output.request_id)
                yield number, self.response(output.outputs[0], len(requests[number].prompt), names[number])
            stepped()
        self.wait_until_idle()

    # ---- one step after the other

    @property
    def most_rows(self) -> int:
        """Requests that a step computes at most; others wait."""
        return self._most_rows

    def add(self, name: str, request: Request, params: "SamplingParams", *, max_tokens: int | None) -> str:
        """Add a request, and return vLLM's name for the request. max_tokens: the limit, where `params` allows more."""
        own = params.clone()
        own.seed = request.seed
        if request.num_before:
            assert own.max_tokens is not None, "every response has a limit"
            own.max_tokens -= request.num_before
            own.min_tokens = max(0, own.min_tokens - request.num_before)
        if max_tokens is not None and max_tokens < (own.max_tokens or max_tokens + 1):
            own.max_tokens, own.min_tokens = max_tokens, min(own.min_tokens, max_tokens)
        return self._engine.add_request(name, {"prompt_token_ids": request.prompt}, own)

    def abort(self, name: str) -> None:
        """The request that `add` was given under this name ends without an output. All ranks of a replica do it."""
        self._engine.abort_request([name])

    def abort_all(self) -> list[tuple[str, RolloutRow]]:
        """All requests end: by the names that `add` was given what each has so far.

        vLLM has no output for an aborted request. All ranks of a replica do it after the same step. The
        experts of a request that waits for blocks are 0: those that it had are others' by now.
        """
        processor, core = (cast(Any, x) for x in (self._engine.output_processor, self._engine.engine_core))
        computed = {request.request_id for request in core.engine_core.scheduler.running}
        found = []
        for name, state in processor.request_states.items():
            token_ids, log_probs = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs.logprobs
            row = RolloutRow(list(token_ids), list(log_probs), calls=1)
            if token_ids and isinstance(self._routing, SlotRecorder):
                size = state.prompt_len + len(token_ids) - 1
                lost = self._routing.sizes.nothing(size)
                row.experts = self._routing.experts(name, None, size) if name in computed else lost
            found.append((state.external_req_id, row))
        self._engine.abort_request([name for name, _ in found])
        while self.is_busy:
            self.step()
        return found

    @property
    def is_busy(self) -> bool:
        """Whether requests run or wait."""
        return self._engine.has_unfinished_requests()

    def step(self) -> "list[RequestOutput]":
        """The requests that have finished in one step of the engine. All ranks of a replica take it together.

        torch's global generators may change: who generates preserves the random state, once for all steps.
        """
        return [output for output in self._engine.step() if output.finished]  # type: ignore[misc]

    def wait_until_idle(self) -> None:
        """After the last step: one that vLLM began ahead may still read weights and write the cache."""
        self._platform.synchronize()

    def response(self, output: "CompletionOutput", num_before: int, name: str) -> RolloutRow:
        """Of a request of `num_before` tokens that the last step has finished. name: that `add` gave."""
        found = response_of(output)
        if self._routing is not None:
            found.experts = self._routing.experts(name, output, num_before + len(found.token_ids) - 1)
        return found


def with_given(settings: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's LLM, and those of the config; of the compiler's passes the others stay as they are."""
    if "compilation_config" not in given:
        return settings | given
    passes = [each.get("compilation_config", {}).get("pass_config", {}) for each in (settings, given)]
    return settings | given | {"compilation_config": {"pass_config": passes[0] | passes[1]}}


def _check_stage(runner: Any, stages: Stages, pp: int) -> None:
    """The groups and the partition that vLLM found must be those of this engine, not of a layout joined since."""
    numbers = (re.search(r"\.layers\.(\d+)\.", name) for name, _ in runner.model.named_parameters())
    layers = tuple(sorted({int(number[1]) for number in numbers if number}))
    if layers != tuple(stages[pp]):
        raise EnvironmentProblem(f"vLLM's stage {pp} has the layers {layers}, the layout says {stages[pp]}")


def _sampling_params(
    sampling: SamplingConfig, eos_token_ids: tuple[int, ...], *, needs_text: bool, temperature: float
) -> "SamplingParams":
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    ends = sampling.stop_token_ids + (() if sampling.ignore_eos else eos_token_ids)
    return SamplingParams(
        temperature=temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        stop=list(sampling.stop) or None,
        stop_token_ids=sorted(set(ends)),
        bad_words=list(sampling.bad_words) or None,
        allowed_token_ids=list(sampling.allowed_token_ids) if sampling.allowed_token_ids is not None else None,
        logit_bias=sampling.logit_bias,
        ignore_eos=True,  # the ends are in stop_token_ids, whatever the model directory says
        min_tokens=sampling.min_response_length,
        max_tokens=sampling.max_response_length,
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,  # in one list, not a dictionary a token
        detokenize=needs_text,
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # all copies for requests share sets and lists, to which vLLM adds the same of each
    )


def response_of(output: "CompletionOutput") -> RolloutRow:
    from vllm.logprobs import FlatLogprobs

    token_ids, log_probs = list(output.token_ids), output.logprobs
    assert isinstance(log_probs, FlatLogprobs), "log-probs were asked for, in one list"
    if log_probs.token_ids != token_ids:
        counts = f"{len(token_ids)} tokens and log-probs of {len(log_probs.token_ids)} tokens"
        raise EnvironmentProblem(f"vLLM returned {counts}; every sampled token needs one, and no other token")
    return RolloutRow(token_ids, log_probs.logprobs, state=CUT if output.finish_reason == "length" else ENDED, calls=1)
