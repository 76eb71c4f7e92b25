"""Gemma 3 and Ministral 3 beside what reads images, under the names of published files: the language model alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from hybridflow.architecture.spec import read_spec
from hybridflow.cli.convert import main
from hybridflow.convert.forward import largest_difference
from tests.tiny_models import FAMILIES, VOCAB_SIZE, make_tokenizer, randomise

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION = {**SIZES, "image_size": 28, "patch_size": 14}
WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", {"vision_config": VISION, "mm_tokens_per_image": 4}),
    "ministral3": (
        "Mistral3",
        {"vision_config": {**VISION, "model_type": "pixtral", "head_dim": 8}, "tie_word_embeddings": False},
    ),
}


@pytest.fixture(scope="module", params=WRAPPERS)
def wrapper(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param) / "model"
    prefix, whole = WRAPPERS[request.param]
    torch.manual_seed(11)
    text = {
        **{"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 128},
        **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, **FAMILIES[request.param][1]},
    }
    if prefix == "Mistral3":
        text["model_type"] = "ministral3"
    config = getattr(transformers, prefix + "Config")(text_config=text, architectures=None, **whole)
    model = getattr(transformers, prefix + "ForConditionalGeneration")(config)
    randomise(model, 0.15)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: x for file in directory.glob("*.safetensors") for name, x in load_file(file).items()}


def test_there_and_back_is_the_language_model_bitwise(wrapper: Path) -> None:
    megatron, back = wrapper.with_name("megatron"), wrapper.with_name("back")
    assert main(["hf-to-megatron", str(wrapper), str(megatron)]) == 0
    assert main(["megatron-to-hf", str(megatron), str(back)]) == 0
    begins = "language_model."
    expected = {n.removeprefix(begins): x for n, x in tensors(wrapper).items() if n.startswith(begins)}
    found = tensors(back)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())
    assert read_spec(wrapper).wrapped and not read_spec(back).wrapped
    assert largest_difference(back, wrapper) < 1e-4
