"""The command line: arguments, messages, progress, and what `show` prints."""

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hybridflow.cli.convert import main
from hybridflow.convert.progress import ByteProgress, size_text
from hybridflow.convert.to_megatron import to_megatron
from tests.launch import ROOT
from tests.messages import like
from tests.tools.convert.tiny import Models, left_in, rewrite, tensors_of


def test_there_and_back(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    assert main(["hf-to-megatron", str(source), str(megatron)]) == 0
    assert main(["megatron-to-hf", str(megatron), str(back), "--max-shard-size", "100KB"]) == 0
    assert main(["verify", str(source), str(back)]) == 0
    assert main(["show", str(back)]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    code, first, second = out.splitlines()[:3]
    assert code == "not copied: modeling_custom.py: --trust-remote-code copies code"
    assert re.fullmatch(rf"{megatron}: 21 tensors, 298\.24 kB in \d+\.\d s \(.*/s\)", first)
    assert re.fullmatch(rf"{back}: 21 tensors in 3 files, 298\.24 kB in \d+\.\d s \(.*/s\)", second)
    assert "equal" in out.splitlines()


def test_an_error_is_lines_on_stderr_and_status_1(source: Path, capsys: pytest.CaptureFixture) -> None:
    tensors = tensors_of(source)
    del tensors["model.norm.weight"], tensors["lm_head.weight"]
    rewrite(source, tensors)
    assert main(["hf-to-megatron", str(source), str(source.with_name("target"))]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    assert error.splitlines() == [
        like(
            f"tools.convert: error: {source}: no tensor model.norm.weight, which config.json asks for with shape (64,)"
        ),
        like(
            f"tools.convert: error: {source}: no tensor lm_head.weight, which config.json asks for with shape (100, 64)"
        ),
    ]


def test_a_directory_that_cannot_be_written(source: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["hf-to-megatron", str(source), "/proc/target"]) == 1
    assert re.fullmatch(r"tools.convert: error: .*/proc.*\n", capsys.readouterr().err)


def test_different_checkpoints_are_status_1(models: Models, source: Path, tmp_path: Path) -> None:
    other = models.copy(tmp_path / "other", kind="reference")
    assert main(["verify", str(source), str(other)]) == 1


@pytest.mark.parametrize("size", ["5 apples", "0", "GB", "-1GB", "5"])
def test_sizes_that_are_none(size: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["megatron-to-hf", str(tmp_path), str(tmp_path / "x"), "--max-shard-size", size])
    assert "error: argument --max-shard-size" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("500 MB", 5 * 10**8), ("1.5gib", 3 << 29), ("12kB", 12000)]
)
def test_sizes(text: str, size: int) -> None:
    from hybridflow.cli.convert import parse

    options = parse(["megatron-to-hf", "a", "b", "--max-shard-size", text])
    assert options.max_shard_size == size
    assert parse(["megatron-to-hf", "a", "b"]).max_shard_size == 5 * 10**9


def test_help_and_wrong_arguments_load_no_heavy_package() -> None:
    code = (
        "import sys; from hybridflow.cli.convert import parse; parse(['show', 'x']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.thorough
def test_a_conversion_loads_neither_transformers_nor_megatron(source: Path, tmp_path: Path) -> None:
    """They take half a gigabyte and seconds."""
    code = (
        "import sys; from hybridflow.cli.convert import main\n"
        f"assert main(['hf-to-megatron', {str(source)!r}, {str(tmp_path / 'megatron')!r}]) == 0\n"
        f"assert main(['megatron-to-hf', {str(tmp_path / 'megatron')!r}, {str(tmp_path / 'back')!r}]) == 0\n"
        f"assert main(['verify', {str(source)!r}, {str(tmp_path / 'back')!r}]) == 0\n"
        "assert not {'transformers', 'megatron', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ---------------------------------------------------------------------------------------------------------- show


def shown(path: Path) -> tuple[bool, list[str]]:
    from hybridflow.convert.show import show

    console = Console(record=True, width=112, file=io.StringIO())
    complete = show(path, console)
    return complete, [line.rstrip() for line in console.export_text().splitlines()]


def test_show_of_either_kind(models: Models, tmp_path: Path) -> None:
    source = models.copy(tmp_path / "source", "mixtral")
    to_megatron(source, tmp_path / "megatron")
    for path, kind, file in (
        (source, "HuggingFace safetensors", "model.safetensors"),
        (tmp_path / "megatron", "megatron-core's torch_dist", "__0_0.distcp"),
    ):
        complete, lines = shown(path)
        assert complete
        assert lines[0] == f"{path}: MixtralForCausalLM in {kind}"
        assert any(line.startswith(f"│ {file}") for line in lines)
        assert any("185,664" in line for line in lines)  # parameters
        start = lines.index("decoder.layers.mlp.experts.experts.linear_fc1.weight        2 x 4 x 192 x 64")
        assert lines[start + 1 : start + 3] == [
            "  model.layers.*.block_sparse_moe.experts.*.w1.weight       96 x 64",
            "  model.layers.*.block_sparse_moe.experts.*.w3.weight       96 x 64",
        ]
        assert lines[-1] == "complete: every tensor is known, none is missing"


def test_show_of_what_is_wrong(source: Path) -> None:
    tensors = tensors_of(source)
    del tensors["model.norm.weight"]
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    rewrite(source, tensors | buffers | {"extra": torch.zeros(2)})
    complete, lines = shown(source)
    assert not complete
    assert lines[-4:] == [
        like("not needed: model.layers.*.self_attn.rotary_emb.inv_freq (2 tensors): follows from config.json"),
        "missing: model.norm.weight (64,)",
        like(f"wrong: {source / 'model.safetensors'}: extra is no weight of the model that config.json describes"),
        "not complete",
    ]
    assert main(["show", str(source)]) == 1


# ------------------------------------------------------------------------------------------------------ progress


def ticking(step: float) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += step


def progress_lines(step: float, **terminal: bool) -> str:
    file = io.StringIO()
    ticks = ticking(step)
    console = Console(file=file, width=120, **terminal)
    with ByteProgress("convert", 1000, console=console, clock=lambda: next(ticks)) as progress:
        for _ in range(100):
            progress.advance(10)
    return file.getvalue()


def test_progress_is_a_line_every_tenth() -> None:
    lines = progress_lines(step=1.0).splitlines()
    assert [line.split(",")[0] for line in lines] == [f"convert: {tenth}0 %" for tenth in range(1, 10)]
    assert re.fullmatch(r"convert: 50 %, 500 bytes of 1\.00 kB, \d+ bytes/s, \d+ s left", lines[4])


def test_progress_of_what_takes_no_time_is_silent() -> None:
    assert progress_lines(step=1e-6) == ""


def test_progress_is_a_bar_on_a_terminal() -> None:
    text = progress_lines(step=1.0, force_terminal=True)
    assert "━" in text
    assert "1.0/1.0 kB" in text


def test_progress_counts_all_processes() -> None:
    file = io.StringIO()
    ticks = ticking(1.0)
    with ByteProgress("x", 1000, own=200, console=Console(file=file), clock=lambda: next(ticks)) as progress:
        progress.advance(100)
    assert file.getvalue().startswith("x: 50 %, 500 bytes of 1.00 kB")


def test_size_text() -> None:
    assert [size_text(n) for n in (999, 1000, 5 * 10**9, 2.5e12)] == ["999 bytes", "1.00 kB", "5.00 GB", "2.50 TB"]


def test_an_interrupt_is_one_line(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def interrupt(self: ByteProgress, num_bytes: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ByteProgress, "advance", interrupt)
    assert main(["hf-to-megatron", str(source), str(tmp_path / "target")]) == 1
    assert capsys.readouterr().err == "tools.convert: error: interrupted\n"
    assert left_in(tmp_path) == ["source"]
