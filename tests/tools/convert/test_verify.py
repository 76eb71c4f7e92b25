"""tools.convert verify: whatever differs is said, down to a bit that means nothing."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hybridflow.cli.convert import main
from hybridflow.convert import compare
from hybridflow.convert.to_megatron import to_megatron
from hybridflow.convert.verify import verify
from tests.launch import ROOT
from tests.messages import like
from tests.tiny_models import FAMILIES
from tests.tools.convert.tiny import Models, change_config, rewrite, tensors_of


@pytest.fixture
def other(source: Path, tmp_path: Path) -> Path:
    """The same model, to be changed."""
    to_megatron(source, tmp_path / "megatron")
    return source


def differences(one: Path, other: Path) -> list[str]:
    """The same the other way round, but for the order of what is shown."""
    found = verify(one, other)
    assert len(verify(other, one)) == len(found)
    return found


def test_a_flipped_bit(other: Path, tmp_path: Path) -> None:
    tensors = tensors_of(other)
    tensors["model.layers.1.mlp.up_proj.weight"].view(torch.int32)[5, 7] = 0x3F800001
    rewrite(other, tensors)
    (line,) = differences(other, tmp_path / "megatron")
    assert line.startswith("model.layers.1.mlp.up_proj.weight: 1 of 6,144 elements differ, the first at [5, 7]: ")
    assert "1.0000001192092896 (bits 0x3f800001)" in line


def test_nan_payloads_and_zeros_of_both_signs(source: Path, tmp_path: Path) -> None:
    tensors = tensors_of(source)
    norm = tensors["model.norm.weight"]
    norm.view(torch.int32)[0], norm[1] = 0x7FC00001, 0.0
    rewrite(source, tensors)
    to_megatron(source, tmp_path / "megatron")
    assert verify(source, tmp_path / "megatron") == []
    norm.view(torch.int32)[0], norm[1] = 0x7FC00002, -0.0
    rewrite(source, tensors)
    assert differences(source, tmp_path / "megatron") == [
        like(
            "model.norm.weight: 2 of 64 elements differ, the first at [0]: nan (bits 0x7fc00002) and nan (bits "
            "0x7fc00001)"
        )
    ]


def test_differences_in_several_pieces(other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are counted over all pieces."""
    monkeypatch.setattr(compare, "PIECE_BYTES", 1000)  # three rows
    tensors = tensors_of(other)
    tensors["lm_head.weight"][[40, 99]] += 1
    rewrite(other, tensors)
    (line,) = differences(other, tmp_path / "megatron")
    assert line.startswith("lm_head.weight: 128 of 6,400 elements differ, the first at [40, 0]: ")


def test_other_keys_dtypes_and_config(other: Path, tmp_path: Path) -> None:
    tensors = tensors_of(other)
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"].half()
    rewrite(other, tensors | {"extra": torch.zeros(2)})
    change_config(other, rms_norm_eps=1e-5)
    megatron = tmp_path / "megatron"
    assert sorted(differences(other, megatron)) == sorted(
        [
            "config.json: norm_eps is 1e-05 and 1e-06",
            f"{other / 'model.safetensors'}: extra is no weight of the model that config.json describes",
            f"model.norm.weight: only in {megatron}",
            "lm_head.weight: float16 (100, 64) and float32 (100, 64)",
        ]
    )


def test_a_head_that_was_replaced(source: Path, tmp_path: Path) -> None:
    to_megatron(source, tmp_path / "megatron", value_head=True)
    assert differences(source, tmp_path / "megatron") == [
        "config.json: head is 'lm' and 'score'",
        f"lm_head.weight: only in {source}",
        f"score.weight: only in {tmp_path / 'megatron'}",
    ]


def test_what_is_printed(other: Path, tmp_path: Path) -> None:
    console = Console(record=True, width=300)
    tensors = tensors_of(other)
    for x in tensors.values():
        x.add_(1)
    rewrite(other, tensors)
    verify(other, tmp_path / "megatron", console=console)
    lines = console.export_text().splitlines()
    assert lines[:3] == [
        f"{other}: HuggingFace, 21 tensors",
        f"{tmp_path / 'megatron'}: megatron, 21 tensors",
        "compared: 21 tensors, 298.24 kB, bit by bit",
    ]
    assert lines[-2:] == ["  ... and 1 more", "different: 21 differences"]


# ------------------------------------------------------------------------------------------------------- --forward


@pytest.mark.thorough
def test_forward(models: Models, tmp_path: Path) -> None:
    """All in one process of their own: megatron-core takes seconds to import, and changes torch on a CPU."""
    pairs = []
    for family in FAMILIES:
        source = models.copy(tmp_path / family / "source", family)
        change_config(source, auto_map={"AutoModelForCausalLM": "modeling_custom.Model"})  # never run
        pairs.append((tmp_path / family / "megatron", source))
    for name in ("critic", "changed"):
        source = models.copy(tmp_path / name / "source", "qwen2", kind="critic" if name == "critic" else "policy")
        pairs.append((source, tmp_path / name / "megatron"))
    for megatron, source in (sorted(pair, key=lambda path: path.name) for pair in pairs):
        to_megatron(source, megatron)
    tensors = tensors_of(tmp_path / "changed" / "source")
    tensors["model.layers.0.self_attn.q_proj.weight"] *= 1.5
    rewrite(tmp_path / "changed" / "source", tensors)
    code = (
        "import sys; from hybridflow.cli.convert import main\n"
        "for pair in zip(sys.argv[1::2], sys.argv[2::2]): print('status', main(['verify', *pair, '--forward']))"
    )
    paths = [str(path) for pair in pairs for path in pair]
    done = subprocess.run([sys.executable, "-c", code, *paths], cwd=ROOT, capture_output=True, text=True, check=True)
    verdicts = [line for line in done.stdout.splitlines() if line.startswith("forward: ")]
    statuses = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("status ")]
    assert statuses == [0] * (len(pairs) - 1) + [1], done.stdout
    assert all(", within 0.0001 (float32)" in line for line in verdicts[:-1]), verdicts
    assert ", NOT within 0.0001 (float32)" in verdicts[-1]
    assert done.stderr == ""


def test_forward_needs_a_huggingface_directory(other: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    megatron = str(tmp_path / "megatron")
    assert main(["verify", megatron, megatron, "--forward"]) == 1
    assert f"error: {megatron}: --forward needs a HuggingFace directory" in capsys.readouterr().err
