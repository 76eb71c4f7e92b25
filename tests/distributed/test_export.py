"""The trained actor as a HuggingFace directory: bitwise, complete, and loaded by transformers and by vLLM."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.distributed.export_layouts_worker import CASES, MODELS, NUM_LAYERS, NUM_RANKS
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import run_ranks
from tests.tiny_models import give_own_head, make_checkpoints, make_tokenizer

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def out(inputs, tmp_path_factory) -> Path:
    """before/, sharded/, run/hf/ and responses.pt of one run at tp 2."""
    out = tmp_path_factory.mktemp("export")
    config = write_config(out / "config.yaml", inputs)
    run_ranks(2, "tests.distributed.export_worker", config, out)
    return out


def test_an_untrained_export_is_bitwise_its_source(inputs, out):
    source = load_file(inputs / "policy" / "model.safetensors")
    exported = load_file(out / "before" / "model.safetensors")
    assert source.keys() == exported.keys()
    assert all(torch.equal(source[name], exported[name]) for name in source)


def test_files_are_split_by_size_and_listed(inputs, out):
    source = load_file(inputs / "policy" / "model.safetensors")
    index = json.loads((out / "sharded" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (out / "sharded").glob("*.safetensors"))
    assert len(files) > 2 and files == sorted(set(index["weight_map"].values()))
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in source.values())
    found = {}
    for file in files:
        tensors = load_file(out / "sharded" / file)
        assert len(tensors) == 1 or sum(x.nbytes for x in tensors.values()) <= 300_000
        assert all(index["weight_map"][name] == file for name in tensors)
        found |= tensors
    assert found.keys() == source.keys() and all(torch.equal(found[name], source[name]) for name in source)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory) -> Path:
    """One directory for each case of the worker, and models/ with what they were loaded from."""
    root = tmp_path_factory.mktemp("layouts")
    for name, (family, tied, num_kv_heads) in MODELS.items():
        make_checkpoints(
            root / "models" / name, family=family, tied=tied, num_layers=NUM_LAYERS, num_kv_heads=num_kv_heads
        )
    give_own_head(root / "models" / "own_head" / "policy")
    run_ranks(NUM_RANKS, "tests.distributed.export_layouts_worker", root / "models", root)
    return root


@pytest.mark.parametrize("name", CASES)
def test_an_export_from_any_layout_is_bitwise_its_source(layouts, name):
    model, _ = CASES[name]
    source = load_file(layouts / "models" / model / "policy" / "model.safetensors")
    files = sorted((layouts / name).glob("*.safetensors"))
    tensors = [load_file(file) for file in files]
    exported = {key: tensor for file in tensors for key, tensor in file.items()}
    assert len(files) > 1 and sum(map(len, tensors)) == len(exported)
    assert source.keys() == exported.keys()
    assert all(torch.equal(source[key], exported[key]) for key in source)
    config = json.loads((layouts / name / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config["tie_word_embeddings"] == ("lm_head.weight" not in source)


def test_nothing_half_written_stays(out, layouts):
    """Torch's own .metadata of the checkpoint at the end of the run is whole."""
    assert {file.name for file in out.rglob(".*")} <= {".metadata"} and not list(layouts.rglob(".*"))


def test_transformers_loads_the_trained_actor(inputs, out):
    """Its log-probs are the trainer's, and training has moved them."""
    saved = torch.load(out / "responses.pt")
    trained = response_log_probs(out / "run" / "hf", saved)
    assert (trained - saved["log_probs"]).abs().max() < 1e-4
    assert (response_log_probs(inputs / "policy", saved) - saved["log_probs"]).abs().max() > 1e-3


def response_log_probs(model: Path, saved: dict[str, torch.Tensor]) -> torch.Tensor:
    policy, rows = AutoModelForCausalLM.from_pretrained(model), []
    pieces = saved["input_ids"].split(saved["lengths"].tolist())
    for tokens, prompt in zip(pieces, saved["prompt_lengths"].tolist(), strict=True):
        with torch.no_grad():
            log_probs = policy(tokens[None]).logits[0].log_softmax(-1)[prompt - 1 : -1]
        row = torch.zeros(len(tokens))
        row[prompt:] = log_probs.gather(1, tokens[prompt:, None]).squeeze(1)
        rows.append(row)
    return torch.cat(rows)


def test_the_tokenizer_comes_along(out):
    tokenizer = AutoTokenizer.from_pretrained(out / "run" / "hf")
    assert tokenizer("12+3=").input_ids == make_tokenizer()("12+3=").input_ids


def test_vllm_loads_the_trained_actor(out):
    saved = torch.load(out / "responses.pt")
    pieces = saved["input_ids"].split(saved["lengths"].tolist())
    prompts = saved["prompt_lengths"].tolist()
    (out / "prompts.json").write_text(json.dumps([x[:p].tolist() for x, p in zip(pieces, prompts, strict=True)]))
    run_ranks(1, "tests.distributed.vllm_worker", out / "run" / "hf", out / "prompts.json", out / "tokens.json")
    expected = [x[p:].tolist() for x, p in zip(pieces, prompts, strict=True)]
    assert json.loads((out / "tokens.json").read_text()) == expected
