"""Mixtures as transformers 5 has them in memory, read as the same model that was saved expert by expert."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hybridflow.architecture.spec import read_spec
from hybridflow.architecture.weight_files import open_checkpoint
from hybridflow.architecture.weights import model_weights
from hybridflow.errors import CheckpointError
from tests.tiny_models import make_checkpoints


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe", "glm4_moe"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same weights: a tensor an expert, and a tensor of all experts, in several files."""
    root = tmp_path_factory.mktemp(request.param)
    plain = make_checkpoints(root, family=request.param, tied=False, num_layers=3) / "policy"
    model = transformers.AutoModelForCausalLM.from_pretrained(plain)
    model.save_pretrained(root / "fused", save_original_format=False, max_shard_size="50KB")
    return plain, root / "fused"


def test_every_tensor_is_that_of_the_plain_files(saved: tuple[Path, Path]) -> None:
    plain, fused = (open_checkpoint(path, read_spec(path)) for path in saved)
    assert len(list(saved[1].glob("*.safetensors"))) > 1
    assert fused.tensors == plain.tensors and any("experts.0." in name for name in plain.tensors)
    for name, info in plain.tensors.items():
        assert torch.equal(fused.read(name, info.shape), plain.read(name, info.shape)), name
    spec = read_spec(saved[1])
    part = next(weight for weight in model_weights(spec, "lm") if weight.experts)
    rows, columns = slice(1, 5), slice(2, 7)
    box = fused.read(part.hf[1], part.shapes(spec)[1], rows, columns)
    assert torch.equal(box, plain.read(part.hf[1], part.shapes(spec)[1])[rows, columns])


def test_another_shape_than_the_configs_is_named(saved: tuple[Path, Path], tmp_path: Path) -> None:
    for file in saved[1].glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for file in saved[1].glob("*.safetensors"):
        tensors = {
            name: tensor[:, 1:].contiguous() if name.endswith("experts.down_proj") else tensor
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, tmp_path / file.name)
    with pytest.raises(
        CheckpointError, match=r"mlp\.experts\.down_proj has shape \(\d+, \d+, \d+\), config\.json asks"
    ):
        open_checkpoint(tmp_path, read_spec(tmp_path))
