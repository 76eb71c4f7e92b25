"""Scales, names and first matrices of adapters."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hybridflow.architecture.lora import Lora, initial_a


@pytest.mark.parametrize(
    ("rank", "alpha", "rslora", "scale"),
    [
        (32, 32.0, False, 1.0),
        (8, 32.0, False, 4.0),
        (16, 4.0, False, 0.25),
        (16, 4.0, True, 1.0),
        (64, 32.0, True, 4.0),
    ],
)
def test_the_scale_is_that_of_peft(rank: int, alpha: float, rslora: bool, scale: float) -> None:
    assert Lora(rank, alpha, use_rslora=rslora).scale == scale
    config = LoraConfig(r=rank, lora_alpha=alpha, use_rslora=rslora, target_modules=["0"])
    assert get_peft_model(nn.Sequential(nn.Linear(4, 4)), config).base_model.model[0].scaling["default"] == scale


@pytest.mark.parametrize(
    ("targets", "excluded", "adapted"),
    [
        (None, (), {"self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"}),
        (("q_proj",), (), {"self_attn.q_proj"}),
        (("self_attn.q_proj", "up_proj"), (), {"self_attn.q_proj", "mlp.up_proj"}),
        (("proj",), (), set()),  # the end of a name, not of a word
        (("attn.q_proj",), (), set()),
        (None, ("q_proj", "mlp.up_proj"), {"self_attn.k_proj"}),
        (("q_proj", "k_proj"), ("k_proj",), {"self_attn.q_proj"}),
        (("model.layers.3.self_attn.q_proj",), (), {"self_attn.q_proj"}),
        (("model.layers.2.self_attn.q_proj",), (), set()),
    ],
)
def test_names_are_whole_or_ends_as_in_peft(
    targets: tuple[str, ...] | None, excluded: tuple[str, ...], adapted: set[str]
) -> None:
    lora = Lora(4, 4.0, targets, excluded)
    names = ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")
    assert {name for name in names if lora.adapts(f"model.layers.3.{name}")} == adapted


def test_a_begins_as_peft_draws_it() -> None:
    """Uniform, of the same bound; a function of name, sizes and seed alone."""
    rank, inputs = 16, 400
    drawn = initial_a("model.layers.0.self_attn.q_proj", rank, inputs, 7)
    linear = nn.Linear(inputs, 4)
    config = LoraConfig(r=rank, target_modules=["0"])
    of_peft = get_peft_model(nn.Sequential(linear), config).base_model.model[0].lora_A["default"].weight
    bound = 1 / math.sqrt(inputs)
    for matrix in (drawn, of_peft):
        assert matrix.shape == (rank, inputs) and 0.97 * bound < matrix.abs().max() <= bound
        assert float(matrix.detach().std()) == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert torch.equal(drawn, initial_a("model.layers.0.self_attn.q_proj", rank, inputs, 7))
    for other in (("model.layers.1.self_attn.q_proj", 7), ("model.layers.0.self_attn.q_proj", 8)):
        assert not torch.equal(drawn, initial_a(other[0], rank, inputs, other[1]))
