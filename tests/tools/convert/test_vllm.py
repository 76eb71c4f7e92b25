"""HuggingFace -> megatron -> HuggingFace: plain vLLM loads the result and generates what transformers does."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridflow.convert.to_huggingface import to_huggingface
from hybridflow.convert.to_megatron import to_megatron
from tests.launch import run_ranks
from tests.tiny_models import make_checkpoints


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_vllm_loads_the_result(family: str, tmp_path: Path) -> None:
    """Plain vLLM, nothing of ours; its CPU build has no heads smaller than 32."""
    source = make_checkpoints(tmp_path, family=family, tied=False, head_dim=32) / "policy"
    to_megatron(source, tmp_path / "megatron")
    to_huggingface(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=400_000)
    prompts = [[5, 6, 7, 8, 9], [10, 11, 12]]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    files = (tmp_path / name for name in ("back", "prompts.json", "tokens.json"))
    run_ranks(1, "tests.distributed.vllm_worker", *files)
    model = AutoModelForCausalLM.from_pretrained(source)
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    assert json.loads((tmp_path / "tokens.json").read_text()) == expected
