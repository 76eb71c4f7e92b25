"""The family whose entry docs/extend/model-family.md shows computes as transformers does, and its engine as it does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.launch import run_ranks
from tests.tiny_models import LLAMA_SIZES, VOCAB_SIZE, make_checkpoints, make_prompts

SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8}
HEADS = {"num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 128}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ERNIE 4.5's policy and reference beside a critic and a reward model of Llama's."""
    root = tmp_path_factory.mktemp("own")
    make_checkpoints(root / "own", family="llama", tied=True, head_dim=32)
    for seed, name in enumerate(("policy", "reference")):
        torch.manual_seed(seed)
        shape = {**LLAMA_SIZES, **SIZES, **HEADS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
        model = transformers.Ernie4_5ForCausalLM(transformers.Ernie4_5Config(**shape, initializer_range=0.1))
        model.save_pretrained(root / "own" / name)
    make_prompts(root / "prompts.jsonl", 32)
    make_prompts(root / "heldout.jsonl", 3, seed=1)
    run_ranks(2, "tests.architecture.own_family_worker", root, root / "prompts.jsonl", root / "out.json")
    return root


@pytest.mark.thorough
@pytest.mark.distributed
def test_twenty_lines_are_a_family(made: Path) -> None:
    found: dict[str, Any] = json.loads((made / "out.json").read_text())
    assert set(found["logits"]) == {"tp1", "tp2", "pp2"} and max(found["logits"].values()) <= 1e-4
    for metrics in found["ppo"]:
        assert metrics["rollout/log_prob_diff_max"] < 1e-4 and metrics["actor/grad_norm"] > 0
        assert metrics["memory/engine_own_weight_bytes"] == 0
    before, after = (load_file(made / path / "model.safetensors") for path in ("own/policy", "hf"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
