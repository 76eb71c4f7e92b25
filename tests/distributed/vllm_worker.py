"""Load a HuggingFace directory with plain vLLM and generate greedily: a world of one, nothing of ours.

python -m tests.distributed.vllm_worker DIRECTORY PROMPTS OUT
"""

import json
import os
import sys
from pathlib import Path


def main(model: str, prompts: Path, out: Path) -> None:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1")
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=1 << 25)
    params = SamplingParams(temperature=0.0, max_tokens=8, detokenize=False)
    requests = [{"prompt_token_ids": ids} for ids in json.loads(prompts.read_text())]
    outputs = llm.generate(requests, params, use_tqdm=False)
    out.write_text(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
