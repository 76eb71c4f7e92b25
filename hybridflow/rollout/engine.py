"""A vLLM engine in this process that generates with the actor's own weight memory.

Each tensor-parallel group of ranks is one replica of the engine with its own rows. Every request has a seed of its own,
so that what is generated depends neither on which other requests share a step nor on how many replicas there are.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hybridflow.config import RolloutConfig, SamplingConfig
from hybridflow.parallel.platform import Platform, preserved_random_state
from hybridflow.rollout.patches import join_groups, prepare_vllm

GIB = 1 << 30


@dataclass(frozen=True)
class Response:
    """One finished sequence: its response tokens, their log-probs under the sampling distribution, and why it ended."""

    token_ids: list[int]
    log_probs: list[float]
    truncated: bool  # cut at the length limit


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    seed: int


def request_seed(*identity: int) -> int:
    """A 63-bit seed that is a pure function of (run seed, iteration, prompt, sample)."""
    digest = hashlib.blake2b(",".join(map(str, identity)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class RolloutEngine:
    """The engine over `source`, the actor's memory by engine parameter name (in the engine's layout while it runs)."""

    def __init__(
        self,
        model: Path,
        source: Callable[[str], Tensor],
        *,
        dtype: str,
        tp_rank_lists: list[list[int]],
        max_length: int,
        sampling: SamplingConfig,
        config: RolloutConfig,
        platform: Platform,
    ) -> None:
        prepare_vllm()
        import vllm

        from hybridflow.rollout.loader import LOAD_FORMAT

        join_groups(tp_rank_lists, platform.local_rank)
        self._needs_text = bool(sampling.stop or sampling.bad_words)
        with preserved_random_state():
            self._llm = vllm.LLM(
                model=str(model),
                load_format=LOAD_FORMAT,
                model_loader_extra_config={"source": source},
                dtype=dtype,
                skip_tokenizer_init=not self._needs_text,
                tensor_parallel_size=len(tp_rank_lists[0]),
                distributed_executor_backend="external_launcher",
                max_model_len=max_length,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=max(config.max_num_batched_tokens, max_length),
                kv_cache_memory_bytes=int(config.kv_cache_gib * GIB),
                enable_prefix_caching=config.enable_prefix_caching,
                enforce_eager=config.enforce_eager or not platform.has_cuda,
                logprobs_mode="processed_logprobs",  # of the distribution that was sampled from
                generation_config="vllm",  # sampling is what the experiment's config says, nothing else
                seed=0,
            )
        self._engine = self._llm.llm_engine

    def reset_prefix_cache(self) -> None:
        """Forget keys and values of earlier weights; must follow every hand-off."""
        assert self._llm.reset_prefix_cache(), "the prefix cache cannot be reset while requests run"

    def parameters(self) -> dict[str, Tensor]:
        """The engine's parameters by its own names."""
        return dict(self._model_runner().model.named_parameters())

    def _model_runner(self) -> Any:
        return self._engine.model_executor.driver_worker.worker.model_runner

    def sampling_params(self, sampling: SamplingConfig, eos_token_ids: tuple[int, ...]) -> Any:
        """vLLM's parameters for this config; a response ends at any of `eos_token_ids` unless ignore_eos."""
        return _sampling_params(sampling, eos_token_ids, needs_text=self._needs_text, temperature=sampling.temperature)

    def greedy_params(self, sampling: SamplingConfig, eos_token_ids: tuple[int, ...]) -> Any:
        """The same, always taking the likeliest token."""
        return _sampling_params(sampling, eos_token_ids, needs_text=self._needs_text, temperature=0.0)

    def stream(self, requests: list[Request], params: Any) -> Iterator[tuple[int, Response]]:
        """(index, response) of each request, in the order in which they finish."""
        for i, request in enumerate(requests):
            own = params.clone()
            own.seed = request.seed
            self._engine.add_request(str(i), {"prompt_token_ids": request.prompt}, own)
        while self._engine.has_unfinished_requests():
            with preserved_random_state():
                outputs = self._engine.step()
            for output in outputs:
                if output.finished:
                    yield int(output.request_id), _response(output.outputs[0])

    def generate(self, requests: list[Request], params: Any) -> list[Response]:
        """One response per request, in the order of the requests."""
        responses = dict(self.stream(requests, params))
        return [responses[i] for i in range(len(requests))]


def _sampling_params(
    sampling: SamplingConfig, eos_token_ids: tuple[int, ...], *, needs_text: bool, temperature: float
) -> Any:
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
        detokenize=needs_text,
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _response(output: Any) -> Response:
    token_ids = list(output.token_ids)
    log_probs = [step[token].logprob for step, token in zip(output.logprobs, token_ids, strict=True)]
    return Response(token_ids, log_probs, truncated=output.finish_reason == "length")
