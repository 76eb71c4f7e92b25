"""Gemma 3 and Ministral 3 beside what reads images, under the names of published files: the language model alone."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hybridflow.architecture.spec import read_spec
from hybridflow.cli.convert import main
from hybridflow.convert.forward import largest_difference
from tests.tiny_models import make_window_wrapper


@pytest.fixture(scope="module", params=["gemma3", "ministral3"])
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
