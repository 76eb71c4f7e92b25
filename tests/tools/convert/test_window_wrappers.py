"""Gemma 3, Ministral 3 and Mistral Small beside what reads images, as they are published: the language model alone."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from hybridflow.architecture.spec import config_changes, read_spec
from hybridflow.cli.convert import main
from hybridflow.convert.forward import largest_difference
from hybridflow.convert.survey import open_survey
from hybridflow.errors import CheckpointError
from tests.tiny_models import make_window_wrapper


@pytest.fixture(scope="module", params=["gemma3", "ministral3", "mistral"])
def wrapper(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_window_wrapper(tmp_path_factory.mktemp(request.param) / "model", request.param)


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


# the head's name, tie_word_embeddings of the wrapper and of text_config, whether the head differs from the embedding
HEADS = [
    ("lm_head.weight", True, False, True),
    ("language_model.lm_head.weight", True, False, True),
    ("language_model.lm_head.weight", None, None, True),
    ("lm_head.weight", False, True, True),
    ("language_model.lm_head.weight", True, True, False),
    (None, None, False, False),
    (None, True, False, False),
]


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_the_wrapper_says_whether_the_head_is_the_embedding(family: str, tmp_path: Path) -> None:
    """And it has one of its own where the two differ, as transformers has it."""
    published = make_window_wrapper(tmp_path / "model", family)
    kept = {name: x for name, x in tensors(published).items() if "lm_head" not in name}
    tokens = kept["language_model.model.embed_tokens.weight"]
    described = json.loads((published / "config.json").read_text())
    for each in (described, described["text_config"]):
        each.pop("tie_word_embeddings", None)
    assert described["text_config"].pop("model_type") in (family, f"{family}_text")  # which has a default too
    for name, wrapper_ties, text_ties, own in HEADS:
        head = {} if name is None else {name: torch.randn_like(tokens) if own else tokens.clone()}
        save_file(kept | head, published / "model.safetensors", metadata={"format": "pt"})
        ties = [{} if says is None else {"tie_word_embeddings": says} for says in (wrapper_ties, text_ties)]
        text = {"text_config": described["text_config"] | ties[1]}
        (published / "config.json").write_text(json.dumps(described | text | ties[0]))
        theirs = AutoModelForImageTextToText.from_pretrained(published)
        same = torch.equal(theirs.lm_head.weight, theirs.get_input_embeddings().weight)
        assert read_spec(published).tied == same == (not own), (name, wrapper_ties, text_ties)
        found = open_survey(published)
        found.check()
        assert own == ("lm_head.weight" in found.weights)
    assert config_changes(read_spec(published), "lm")["model_type"] in (family, f"{family}_text")


def test_a_head_by_a_name_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    published = make_window_wrapper(tmp_path / "model", "mistral")
    head = "language_model.lm_head.weight"
    misnamed = {f"model.{name}" if name == head else name: x for name, x in tensors(published).items()}
    save_file(misnamed, published / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"model.{head} is no name by which"):
        open_survey(published)


def test_what_reads_images_by_the_names_of_transformers_5(tmp_path: Path) -> None:
    published = make_window_wrapper(tmp_path / "model", "gemma3")
    parts = ("vision_tower.", "multi_modal_projector.")
    named = {f"model.{name}" if name.startswith(parts) else name: x for name, x in tensors(published).items()}
    save_file(named, published / "model.safetensors")
    found = open_survey(published)
    found.check()
    assert [line.split(" ")[0] for line in found.dropped_lines()] == [f"model.{part}*" for part in reversed(parts)]
