"""An episode with verifiers' training client, by the Python that has verifiers: this file is run, not imported.

    PYTHON -P train_client_episode.py URL TASK RENDERER_MODEL MAX_TOKENS

The last line out is what verifiers has recorded:

    {"problem": "", "reward": 2.5, "branches": [{"token_ids": [...], "mask": [...], "log_probs": [...]}]}
"""

import asyncio
import json
import sys
from typing import Any

import verifiers.v1 as vf
from renderers.configs import Qwen3RendererConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


async def play(base_url: str, task: int, renderer_model: str, max_tokens: int) -> dict[str, Any]:
    environment = load_environment(resolve_env_config({"taskset": {"id": "two_turns"}}))
    client = vf.TrainClientConfig(
        base_url=base_url,
        api_key_var="NOBODY_HAS_THIS_KEY",
        renderer=Qwen3RendererConfig(thinking_retention="all"),
        renderer_model_name=renderer_model,
    )
    sampling = vf.SamplingConfig(max_tokens=max_tokens, temperature=0.5, cache_salt="v1")
    context = vf.ModelContext(model="policy", client=client, sampling=sampling)
    async with environment.serving():
        episode = await environment.run_episode(list(environment.taskset)[task], context)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not episode.ok:
        return {"problem": "; ".join(f"{error.type}: {error.message}" for error in errors) or "not ok"}
    [trace] = episode.traces
    branches = [
        {"token_ids": branch.token_ids, "mask": branch.sampled_mask, "log_probs": branch.logprobs}
        for branch in trace.branches
    ]
    return {"problem": "", "reward": trace.reward, "branches": branches}


if __name__ == "__main__":
    url, number, model, tokens = sys.argv[1:]
    print(json.dumps(asyncio.run(play(url, int(number), model, int(tokens)))))
