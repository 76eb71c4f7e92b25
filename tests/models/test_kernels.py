"""What a run on GPUs says of its kernels: facts in, a line out; and the facts that can be had without a GPU."""

from dataclasses import replace
from pathlib import Path

import megatron.core.optimizer as megatron_optimizer
import pytest
import torch

from hybridflow.models.kernels import KernelFacts, kernel_line, optimizer_source, why_not

ALL = KernelFacts(None, None, (9, 0), True, "FA3", None, "Transformer Engine")
NONE = KernelFacts(
    "No module named 'transformer_engine'",
    "undefined symbol: _ZN3c10",
    (9, 0),
    flash_built=True,
    flash_activated=None,
    no_flash3="No module named 'flash_attn_interface'",
    optimizer="torch",
)
BOTH = {"actor": "bfloat16", "critic": "bfloat16"}


def test_everything_is_there() -> None:
    assert kernel_line(ALL, BOTH, adam=True) == (
        "kernels for training: layers of Transformer Engine; gradient accumulation fused by Transformer Engine and "
        "apex; attention by flash attention 3, active in torch; Adam of Transformer Engine"
    )


def test_what_is_not_taken_is_said_with_its_reason() -> None:
    assert kernel_line(NONE, BOTH, adam=True) == (
        "kernels for training: layers of megatron without Transformer Engine (No module named 'transformer_engine'); "
        "gradient accumulation not fused, which takes Transformer Engine or apex (undefined symbol: _ZN3c10); "
        "attention by flash attention 2 of torch (not 3: No module named 'flash_attn_interface'); Adam of torch, fused "
        "(Transformer Engine and apex have none here)"
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"no_gradient_accumulation": "No module named 'x'"},
            "fused by Transformer Engine, but for the output layer, which takes apex (No module named 'x');",
        ),
        ({"no_transformer_engine": "none"}, "gradient accumulation fused by apex;"),
        ({"flash_activated": "FA4"}, "attention by flash attention 4, active in torch;"),
        (
            {"flash_activated": None, "capability": (7, 5)},
            "for which compute capability 7.5 is below 8.0: training will fail;",
        ),
        ({"flash_activated": None, "flash_built": False}, "which this torch was not built with: training will fail;"),
        ({"optimizer": "apex"}, "; Adam of apex"),
    ],
)
def test_kinds_of_attention_and_optimizer(changes: dict, said: str) -> None:
    assert said in kernel_line(replace(ALL, **changes), BOTH, adam=True)


def test_attention_of_models_in_float32_is_said_for_them_alone() -> None:
    some = kernel_line(ALL, BOTH | {"reference": "float32"}, adam=True)
    assert "; attention by flash attention 3" in some
    assert "; attention of reference by torch's scaled_dot_product_attention (flash takes 16 bits);" in some
    assert "; products of reference without TF32;" in some
    assert "Adam" not in kernel_line(ALL, BOTH, adam=False)
    assert "flash attention" not in kernel_line(ALL, {"actor": "float32"}, adam=True)


def test_models_that_ask_for_cudnns_attention_are_named() -> None:
    some = kernel_line(ALL, BOTH | {"reference": "float32"}, adam=True, fused=["critic", "reference"])
    assert "by flash attention 3, active in torch; attention of critic by cuDNN through Transformer Engine;" in some
    assert "attention of reference by torch's" in some
    assert "flash attention 3" not in kernel_line(ALL, {"actor": "bfloat16"}, adam=True, fused=["actor"])


def test_a_package_that_is_there_and_broken_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "built_for_another_torch.py").write_text("raise ImportError('undefined symbol: x')")
    monkeypatch.syspath_prepend(tmp_path)
    assert why_not("built_for_another_torch") == "undefined symbol: x"
    assert why_not("nowhere_at_all") == "No module named 'nowhere_at_all'"
    assert why_not("json") is None


def test_whose_adam_megatron_has_found() -> None:
    names = {"transformer_engine.pytorch.optimizers.fused_adam": "Transformer Engine", "apex.optimizers": "apex"}
    for module, source in names.items():
        assert optimizer_source(type("FusedAdam", (), {"__module__": module})) == source
    assert megatron_optimizer.Adam is torch.optim.AdamW, "there is neither on this machine"
    assert optimizer_source(megatron_optimizer.Adam) == "torch"


@pytest.mark.parametrize(
    ("wanted", "missing", "said"),
    [
        ("auto", None, "tokens of actor go to experts of other replicas by DeepEP;"),
        ("auto", "No module named 'deep_ep'", "by all-to-all, not DeepEP (No module named 'deep_ep');"),
        ("alltoall", None, "tokens of actor go to experts of other replicas by all-to-all;"),
    ],
)
def test_the_way_of_tokens_to_experts_of_other_replicas(wanted: str, missing: str | None, said: str) -> None:
    facts = replace(ALL, no_deep_ep=missing)
    assert said in kernel_line(facts, BOTH, adam=True, sending={"actor": wanted})
    assert "experts" not in kernel_line(facts, BOTH, adam=True)
