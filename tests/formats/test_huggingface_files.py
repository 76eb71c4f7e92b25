"""Files that safetensors and transformers read, written tensor by tensor, and what is copied beside them."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hybridflow.errors import CheckpointError
from hybridflow.formats.huggingface_files import (
    copy_companions,
    num_bytes,
    plan_files,
    write_config,
    write_index,
    write_safetensors,
)
from hybridflow.formats.safetensors_files import NAMES, READABLE, SafetensorsDirectory, TensorInfo
from tests.tiny_models import make_tokenizer


def infos(tensors: dict[str, Tensor]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(tuple(x.shape), x.dtype) for name, x in tensors.items()}


def some_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"x.{i}": torch.randn(3 + i, 5, generator=generator).to(dtype) for i, dtype in enumerate(READABLE)}
    return {"ü": torch.randn(1, generator=generator), "scalar": torch.tensor(2.5), "none": torch.zeros(0, 3), **tensors}


def test_safetensors_reads_every_bit(tmp_path: Path) -> None:
    tensors, sizes = some_tensors(), []
    file = tmp_path / "model.safetensors"
    write_safetensors(file, infos(tensors), tensors.__getitem__, written=sizes.append)
    found = load_file(file)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], x) and found[name].dtype == x.dtype for name, x in tensors.items())
    assert sizes == [x.nbytes for x in tensors.values()]
    with safe_open(file, framework="pt") as handle:
        assert handle.metadata() == {"format": "pt"}
    assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0
    assert SafetensorsDirectory(tmp_path).tensors == infos(tensors)


def test_the_file_is_that_of_the_safetensors_library(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(4, 3), "b": torch.randn(7)}  # its order: dtype, then name
    write_safetensors(tmp_path / "ours", infos(tensors), tensors.__getitem__)
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    alive, most = set(), []

    def read(name: str) -> Tensor:
        tensor = torch.zeros(100)
        weakref.finalize(tensor, alive.discard, name)
        alive.add(name)
        most.append(len(alive))
        return tensor

    write_safetensors(tmp_path / "x", {f"{i}": TensorInfo((100,), torch.float32) for i in range(20)}, read)
    assert most == [1] * 20


@pytest.mark.parametrize("wrong", [torch.zeros(4), torch.zeros(3).half()])
def test_another_tensor_than_planned_is_not_written(wrong: Tensor, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"^a: .* planned torch\.float32 \(3,\)$"):
        write_safetensors(tmp_path / "x", {"a": TensorInfo((3,), torch.float32)}, lambda name: wrong)


def test_every_dtype_that_is_read_has_a_name() -> None:
    assert [NAMES[dtype] for dtype in READABLE] == ["F32", "BF16", "F16"]


# --------------------------------------------------------------------------------------------------- files


def test_files_are_filled_in_order() -> None:
    tensors = {name: TensorInfo((size,), torch.float32) for name, size in zip("abcde", (5, 5, 30, 2, 3), strict=True)}
    assert num_bytes(tensors["c"]) == 120
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    expected = dict(zip("abcde", [names[0]] * 2 + [names[1]] + [names[2]] * 2, strict=True))
    assert plan_files(tensors, 40) == expected  # c is larger than a file and has its own
    assert list(plan_files(tensors, 40)) == list("abcde")
    assert plan_files(tensors, 180) == dict.fromkeys("abcde", "model.safetensors")
    assert plan_files({}, 10) == {}


def test_transformers_loads_a_model_in_shards(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source, target = tmp_path / "source", tmp_path / "target"
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes)).bfloat16().save_pretrained(source)
    make_tokenizer().save_pretrained(source)
    target.mkdir()
    files = SafetensorsDirectory(source)
    plan = plan_files(files.tensors, 2000)
    for file in dict.fromkeys(plan.values()):
        inside = {name: files.tensors[name] for name in plan if plan[name] == file}
        write_safetensors(target / file, inside, lambda name: files.read(name, files.tensors[name].shape))
    total = sum(map(num_bytes, files.tensors.values()))
    write_index(target, plan, total)
    write_config(source, target, {}, dtype=torch.bfloat16)
    copy_companions(source, target)
    assert len(list(target.glob("*.safetensors"))) > 2
    assert json.loads((target / "model.safetensors.index.json").read_text())["metadata"] == {"total_size": total}
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (source, target))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert AutoTokenizer.from_pretrained(target)("1+2").input_ids == make_tokenizer()("1+2").input_ids
    assert SafetensorsDirectory(target).tensors.keys() == files.tensors.keys()


def test_one_file_has_no_index(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "model.safetensors"}, 4)
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------- beside them


def test_config_keeps_all_but_the_dtype_and_what_is_changed(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    config = {"architectures": ["A"], "torch_dtype": "float32", "odd": [1, {"x": None}], "auto_map": {"A": "code.A"}}
    (source / "config.json").write_text(json.dumps(config))
    changes = {"architectures": ["B"], "num_labels": 1}
    write_config(source, target, changes, dtype=torch.bfloat16)
    written = json.loads((target / "config.json").read_text())
    assert written == {"architectures": ["B"], "odd": [1, {"x": None}], "dtype": "bfloat16", "num_labels": 1}
    write_config(source, target, {}, trust_remote_code=True)
    assert json.loads((target / "config.json").read_text()) == config
    (source / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=f"^{source / 'config.json'}: is not JSON: "):
        write_config(source, target, {})


COPIED = [
    *["added_tokens.json", "chat_template.jinja", "generation_config.json", "merges.txt", "special_tokens_map.json"],
    *[
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer.model.v3",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
        "qwen.tiktoken",
    ],
    *["additional_chat_templates/tools.jinja", "LICENSE"],
]
LEFT = [
    *["config.json", "metadata.json", "common.pt", ".metadata", "__0_0.distcp", "model.safetensors.index.json"],
    *["model.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json", "training_args.bin", "README.md"],
    *[".gitattributes", "original/consolidated.00.pth", "original/params.json"],
]


def test_what_is_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for name in (*COPIED, *LEFT, "modeling_x.py", "tokenization_x.py"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    (source / "folder.json").mkdir()
    target.mkdir()
    assert sorted(copy_companions(source, target)) == sorted(COPIED)
    found = {str(file.relative_to(target)): file.read_text() for file in target.rglob("*") if file.is_file()}
    assert found == {name: name for name in COPIED}
    with_code = copy_companions(source, target, trust_remote_code=True)
    assert sorted(with_code) == sorted([*COPIED, "modeling_x.py", "tokenization_x.py"])
