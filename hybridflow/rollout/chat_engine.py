"""vLLM as users have it, on a model directory: for talking to a model, not for training beside it."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hybridflow.architecture.spec import read_spec
from hybridflow.errors import CheckpointError, EnvironmentProblem
from hybridflow.rollout.device import engine_device, set_environment
from hybridflow.rollout.language_model import LanguageModel, leave_out_images

CPU_CACHE_BYTES = 1 << 30  # of keys and values


class ChatEngine:
    """Generates from one prompt at a time. Errors: EnvironmentProblem where vLLM is not installed."""

    def __init__(self, model: Path, *, max_length: int) -> None:
        set_environment()
        try:
            import vllm
        except ImportError as error:
            hint = "`bash launch/setup.sh` installs vLLM, with --cuda for GPUs"
            raise EnvironmentProblem(f"vLLM cannot be imported ({error}): {hint}") from error
        device, language_model = engine_device(), _language_model(model)
        cpu, arguments = device.kind == "cpu", dict[str, Any]()
        if language_model is not None and language_model.needs_words:
            language_model.prepared(device)
            arguments = language_model.arguments(device.kind, prefix_caching=True)
            if language_model.wrapped:
                leave_out_images(language_model.architecture)
        self._llm = vllm.LLM(
            model=str(model),
            # vLLM would round float32 weights to 16 bits; on GPUs the attention takes no others
            dtype="float32" if cpu and _is_float32(model) else "auto",
            max_model_len=max_length,
            max_num_seqs=1,
            skip_tokenizer_init=True,
            generation_config="vllm",
            seed=0,
            enforce_eager=cpu,
            kv_cache_memory_bytes=CPU_CACHE_BYTES if cpu else None,
            use_tqdm_on_load=False,
            **arguments,
        )
        self._requests = 0

    def stream(
        self, prompt: Sequence[int], *, ends: Sequence[int], max_tokens: int, temperature: float, seed: int
    ) -> Iterator[list[int]]:
        """All token ids of the response so far, after each step. temperature 0 takes the likeliest token."""
        from vllm import RequestOutput, SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            stop_token_ids=list(ends),
            seed=seed,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        self._requests += 1
        engine = self._llm.llm_engine
        engine.add_request(str(self._requests), TokensPrompt(prompt_token_ids=list(prompt)), params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert isinstance(output, RequestOutput), "the model generates"
                yield list(output.outputs[0].token_ids)


def _language_model(model: Path) -> LanguageModel | None:
    """None of a model that hybridflow does not train: vLLM may know it."""
    try:
        return LanguageModel.of(read_spec(model)).from_files
    except CheckpointError:
        return None


def _is_float32(model: Path) -> bool:
    tree = json.loads((model / "config.json").read_bytes())
    text = tree.get("text_config", tree)  # of a language model with what reads images beside it
    return bool(text.get("dtype", text.get("torch_dtype")) == "float32")
