"""Tiny checkpoints for the tests of tools.convert: cast, cut into files, changed."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny_models import make_checkpoints

INDEX = "model.safetensors.index.json"
SENTENCEPIECE = bytes(range(256)) * 3  # nobody reads it, it is only copied
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


class Models:
    """ROOT/FAMILY-tied/{policy, reference, reward, critic}, made when they are first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def copy(self, target: Path, family: str = "llama", *, tied: bool = False, kind: str = "policy") -> Path:
        """A directory of one's own, with a tokenizer of every sort."""
        made = self._root / f"{family}-{tied}"
        if not made.exists():
            make_checkpoints(made, family=family, tied=tied)
        shutil.copytree(made / kind, target)
        (target / "tokenizer.model").write_bytes(SENTENCEPIECE)
        (target / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        (target / "modeling_custom.py").write_text("raise SystemExit('code of a checkpoint has been run')\n")
        return target


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """By safetensors' own reader."""
    return {name: x for file in sorted(directory.glob("*.safetensors")) for name, x in load_file(file).items()}


def rewrite(directory: Path, tensors: dict[str, Tensor], *, num_files: int = 1) -> None:
    """Replace the weights, by safetensors' own writer; each file has every num_files-th tensor."""
    for file in [*directory.glob("*.safetensors"), *directory.glob(INDEX)]:
        file.unlink()
    if num_files == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = [f"model-{i:05d}-of-{num_files:05d}.safetensors" for i in range(1, num_files + 1)]
    plan = {name: names[i % num_files] for i, name in enumerate(tensors)}
    for file in names:
        held = {name: x for name, x in tensors.items() if plan[name] == file}
        save_file(held, directory / file, metadata={"format": "pt"})
    total = sum(x.nbytes for x in tensors.values())
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": plan}))


def cast(directory: Path, dtype: torch.dtype, *, num_files: int = 1) -> None:
    """Weights of this dtype, with NaN payloads, infinities and both zeros among them."""
    tensors = {name: x.to(dtype) for name, x in tensors_of(directory).items()}
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}[dtype]
    for i, x in enumerate(tensors.values()):
        odd = torch.tensor([float("nan"), float("-inf"), -0.0, 0.0, 1e-7], dtype=dtype).view(bits)
        odd[0] += i + 1  # another payload for every tensor
        x.view(bits).view(-1)[:5] = odd[: x.numel()]
    rewrite(directory, tensors, num_files=num_files)


def change_config(directory: Path, **changes: Any) -> None:
    """None removes a field."""
    config = json.loads((directory / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if value is not None or key not in changes}
    (directory / "config.json").write_text(json.dumps(kept))


def assert_same_bytes(one: Path, other: Path) -> None:
    """Of every tensor, compared as numbers without a meaning."""
    a, b = tensors_of(one), tensors_of(other)
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert (x.dtype, x.shape) == (b[name].dtype, b[name].shape), name
        assert torch.equal(x.view(torch.uint8), b[name].view(torch.uint8)), name


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())
