"""Language model heads and value heads: what is kept, dropped and made, and what config.json says then."""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForSequenceClassification

from hybridflow.architecture.spec import read_spec
from hybridflow.convert.survey import open_survey
from hybridflow.convert.to_huggingface import to_huggingface
from hybridflow.convert.to_megatron import to_megatron
from hybridflow.errors import CheckpointError
from tests.messages import like
from tests.tiny_models import FAMILIES, SCORES
from tests.tools.convert.tiny import Models, assert_same_bytes, change_config, left_in, rewrite, tensors_of

pytestmark = pytest.mark.slow  # many models


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_causal_model_gets_a_value_head_of_zeros(family: str, tied: bool, models: Models, tmp_path: Path) -> None:
    source = models.copy(tmp_path / "source", family, tied=tied)
    rewrite(source, {name: x.bfloat16() for name, x in tensors_of(source).items()})
    to_megatron(source, tmp_path / "megatron", value_head=True)
    to_huggingface(tmp_path / "megatron", tmp_path / "back")
    expected = {name: x for name, x in tensors_of(source).items() if name != "lm_head.weight"}
    found = tensors_of(tmp_path / "back")
    score = found.pop("score.weight")
    assert torch.equal(score, torch.zeros(1, 24 if family == "opt_350m" else 64, dtype=torch.bfloat16))
    assert found.keys() == expected.keys()
    assert all(torch.equal(x, expected[name]) for name, x in found.items())
    assert read_spec(tmp_path / "megatron").head == "score"


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SCORES])
def test_transformers_loads_a_new_value_head(family: str, models: Models, tmp_path: Path) -> None:
    source = models.copy(tmp_path / "source", family)
    change_config(source, id2label=None, label2id=None)  # then transformers thinks of two labels
    to_megatron(source, tmp_path / "megatron", value_head=True)
    to_huggingface(tmp_path / "megatron", tmp_path / "back")
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert model(torch.tensor([[5, 6, 7]])).logits.tolist() == [[0.0]]


def test_config_of_a_new_value_head(source: Path, tmp_path: Path) -> None:
    change_config(source, id2label={"0": "good", "1": "bad"}, label2id={"good": 0, "bad": 1})
    to_megatron(source, tmp_path / "megatron", value_head=True)
    config = json.loads((tmp_path / "megatron" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0"}
    assert config["label2id"] == {"LABEL_0": 0}
    assert AutoConfig.from_pretrained(tmp_path / "megatron").num_labels == 1


@pytest.mark.parametrize("value_head", [False, True])
def test_a_score_head_is_kept(value_head: bool, models: Models, tmp_path: Path) -> None:
    source = models.copy(tmp_path / "source", kind="critic")
    to_megatron(source, tmp_path / "megatron", value_head=value_head)
    to_huggingface(tmp_path / "megatron", tmp_path / "back")
    assert_same_bytes(source, tmp_path / "back")


def test_a_score_head_that_is_missing(models: Models, tmp_path: Path) -> None:
    source = models.copy(tmp_path / "source", kind="critic")
    tensors = tensors_of(source)
    del tensors["score.weight"]
    rewrite(source, tensors)
    with pytest.raises(CheckpointError, match=r"no tensor score.weight, which config.json asks for with shape \(1, 64"):
        to_megatron(source, tmp_path / "megatron")
    to_megatron(source, tmp_path / "megatron", value_head=True)
    assert open_survey(tmp_path / "megatron").missing == {}


def test_what_happens_to_heads_is_said(models: Models, tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    for tied in (False, True):
        source = models.copy(tmp_path / f"source-{tied}", tied=tied)
        to_megatron(source, tmp_path / f"megatron-{tied}", value_head=True, console=console)
    said = [line for line in console.export_text().splitlines() if line.startswith(("dropped: ", "new: "))]
    new = "new: a value head, score.weight, of zeros: all values are 0 at first"
    assert said == [
        like("dropped: the language model head, lm_head.weight: as asked for"),
        new,
        like("dropped: the language model head, lm_head.weight: model.embed_tokens.weight, to which it is tied, stays"),
        new,
    ]


def test_no_head_at_all(source: Path, tmp_path: Path) -> None:
    to_megatron(source, tmp_path / "megatron", lm_head="drop")
    survey = open_survey(tmp_path / "megatron")
    assert survey.missing == {"score.weight": (1, 64)}
    assert survey.problems == ()
    assert survey.spec.head == "score"
    with pytest.raises(CheckpointError, match=r"no tensor score\.weight"):
        to_huggingface(tmp_path / "megatron", tmp_path / "back")


def test_keep_is_the_default(source: Path, tmp_path: Path) -> None:
    to_megatron(source, tmp_path / "megatron", lm_head="keep")
    to_huggingface(tmp_path / "megatron", tmp_path / "back")
    assert_same_bytes(source, tmp_path / "back")


def test_heads_that_exclude_each_other(models: Models, source: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it cannot be kept"):
        to_megatron(source, tmp_path / "megatron", value_head=True, lm_head="keep")
    critic = models.copy(tmp_path / "critic", kind="critic")
    with pytest.raises(CheckpointError, match=r"critic/config.json: .* no language model head to drop"):
        to_megatron(critic, tmp_path / "megatron", lm_head="drop")
    assert left_in(tmp_path) == ["critic", "source"]
