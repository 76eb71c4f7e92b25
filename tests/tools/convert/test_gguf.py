"""A GGUF file becomes a directory that transformers and hybridflow read: weights, tokenizer, begin token."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from hybridflow.architecture.spec import read_spec
from hybridflow.cli.chat import main as chat
from hybridflow.cli.convert import main
from hybridflow.errors import CheckpointError

HEADS, GROUPS, HEAD, HIDDEN, FFN = 4, 2, 8, 32, 64
WORDS = ["<unk>", "<s>", "</s>", "ab", *"abcdefgh"]
SPECIAL, NORMAL = 3, 1  # kinds of tokens


def weights() -> dict[str, torch.Tensor]:
    """By the names of llama.cpp: a layer, tied. Numbers that a block of 32 elements of 8 bits holds exactly."""
    source = torch.Generator().manual_seed(3)
    shapes = {
        "token_embd": (len(WORDS), HIDDEN),
        "blk.0.attn_q": (HEADS * HEAD, HIDDEN),
        "blk.0.attn_k": (GROUPS * HEAD, HIDDEN),
        "blk.0.attn_v": (GROUPS * HEAD, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HEADS * HEAD),
        "blk.0.ffn_gate": (FFN, HIDDEN),
        "blk.0.ffn_up": (FFN, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FFN),
    }
    found = {name: torch.randint(-126, 127, shape, generator=source) / 64.0 for name, shape in shapes.items()}
    for rows in found.values():
        rows[:, ::32] = 127 / 64.0  # the largest of each block: the scale is 1/64
    return found | {name: torch.ones(HIDDEN) for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")}


def write_gguf(
    file: Path, *, kind: str = "gpt2", begins: bool | None = False, pre: str | None = None, tensors: Any = None
) -> Path:
    """kind, pre: of the tokenizer, by llama.cpp's names. tensors: in place of all weights."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model(kind)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(WORDS)
    writer.add_token_types([SPECIAL] * 3 + [NORMAL] * (len(WORDS) - 3))
    writer.add_token_scores([-float(i) for i in range(len(WORDS))])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if begins is not None:
        writer.add_add_bos_token(begins)
    for name, tensor in (weights() if tensors is None else tensors).items():
        if tensor.ndim == 1:
            writer.add_tensor(f"{name}.weight", tensor.numpy())
        else:
            quantized = gguf.GGMLQuantizationType.Q8_0
            blocks = gguf.quantize(tensor.numpy().astype(np.float32), quantized)
            writer.add_tensor(f"{name}.weight", blocks, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_weights_are_those_of_the_blocks(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """llama.cpp has the halves of a head's rotary pairs beside each other; a directory has one half after the other."""
    file = write_gguf(tmp_path / "m.gguf", kind="gpt2", begins=False)
    assert main(["gguf-to-hf", str(file), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out
    found, given = load_file(tmp_path / "out" / "model.safetensors"), weights()
    assert len(found) == len(given)
    assert torch.equal(found["model.embed_tokens.weight"], given["token_embd"])
    assert torch.equal(found["model.layers.0.mlp.down_proj.weight"], given["blk.0.ffn_down"])
    for name, theirs, heads in (("q", "attn_q", HEADS), ("k", "attn_k", GROUPS)):
        pairs = given[f"blk.0.{theirs}"].view(heads, HEAD // 2, 2, HIDDEN)
        expected = pairs.transpose(1, 2).reshape(heads * HEAD, HIDDEN)
        assert torch.equal(found[f"model.layers.0.self_attn.{name}_proj.weight"], expected)
    spec = read_spec(tmp_path / "out")
    assert (spec.num_layers, spec.vocab_size) == (1, len(WORDS))
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in (tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("said", "pre", "begins"), [(True, None, True), (False, "llama-bpe", False), (None, "llama-bpe", True)]
)
def test_the_tokenizer_begins_as_the_file_says(
    tmp_path: Path, said: bool | None, pre: str | None, begins: bool
) -> None:
    """A file that says nothing begins as llama.cpp has it for the kind of its tokenizer."""
    file = write_gguf(tmp_path / "m.gguf", begins=said, pre=pre)
    assert main(["gguf-to-hf", str(file), str(tmp_path / "out")]) == 0
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("cab")["input_ids"]
    assert (ids[0] == 1) is begins and ids[-1] != 1


def test_a_file_that_is_none_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    broken, out = tmp_path / "m.gguf", tmp_path / "out"
    broken.write_bytes(b"GGUF" + b"\0" * 64)
    assert main(["gguf-to-hf", str(broken), str(out)]) == 1
    assert "transformers cannot read it" in capsys.readouterr().err
    assert main(["gguf-to-hf", str(tmp_path / "none"), str(out)]) == 1
    assert "is no GGUF file" in capsys.readouterr().err
    assert not out.exists()


def test_what_transformers_would_make_up_or_leave_out_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out, one = tmp_path / "out", tmp_path / "one"
    one.mkdir()
    lacking = {name: tensor for name, tensor in weights().items() if name != "blk.0.ffn_down"}
    write_gguf(one / "lacking.gguf", tensors=lacking)
    assert main(["gguf-to-hf", str(one), str(out)]) == 1
    assert "the file has no model.layers.0.mlp.down_proj.weight, and 0 more" in capsys.readouterr().err
    write_gguf(one / "scaled.gguf", tensors=weights() | {"rope_freqs": torch.ones(HEAD // 2)})
    assert main(["gguf-to-hf", str(one / "scaled.gguf"), str(out)]) == 1
    assert "scaled.gguf: has rope_freqs.weight, rotary frequencies" in capsys.readouterr().err
    assert main(["gguf-to-hf", str(one), str(out)]) == 1
    assert "holds lacking.gguf, scaled.gguf: name one of them" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("name", ["m.gguf", "M.GGUF"])
def test_a_gguf_file_in_the_place_of_a_model_says_what_to_do(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The file itself, and a directory with nothing else."""
    (tmp_path / "of").mkdir()
    file = tmp_path / "of" / name
    file.write_bytes(b"GGUF")
    advice = f"{name} is a GGUF file: run `hybridflow convert gguf-to-hf {file} DIR`, then name DIR"
    for given in (file, file.parent):
        with pytest.raises(CheckpointError) as raised:
            read_spec(given)
        assert advice in str(raised.value)
        assert main(["hf-to-megatron", str(given), str(tmp_path / "out")]) == 1
        assert chat([str(given), "--prompt", "x"]) == 1
        assert capsys.readouterr().err.count(advice) == 2
