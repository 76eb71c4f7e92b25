"""What a role saves is a torch_dist checkpoint to megatron-core's own reader and to tools.convert, as it is."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridflow.architecture.parts import whole_parts
from hybridflow.architecture.spec import ModelSpec, read_spec
from hybridflow.architecture.weights import model_weights, stored_at
from hybridflow.cli.convert import main
from hybridflow.convert.to_huggingface import to_huggingface
from hybridflow.convert.verify import verify
from hybridflow.parallel.layout import Cut
from tests.checkpoint.layouts import MODELS
from tests.checkpoint.sharded_worker import CASES
from tests.launch import run_ranks
from tests.tiny_models import make_checkpoints
from tests.tools.convert.tiny import tensors_of

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

ACTORS = ["float32", "bfloat16"]
CRITICS = ["critic of policy", "critic of critic"]
MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ()}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sharded")
    for name in ("llama", "qwen2"):
        family, tied = MODELS[name]
        make_checkpoints(root / "models" / name, family=family, tied=tied, num_layers=2)
    make_checkpoints(root / "models" / "deep", family="llama", tied=False, num_layers=3)
    (root / "out").mkdir()
    run_ranks(2, "tests.checkpoint.sharded_worker", root / "models", root / "out")
    return root / "out"


def role_of(name: str, out: Path) -> Path:
    return out / name / "step_000001" / ("actor" if CASES[name][0] == "actor" else "critic")


def head_of(name: str) -> str:
    return "lm" if CASES[name][0] == "actor" else "score"


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit."""
    return a.dtype == b.dtype and a.shape == b.shape and a.contiguous().view(torch.uint8).equal(b.view(torch.uint8))


# ------------------------------------------------------------------------------------------------ megatron


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ACTORS)
def test_a_plain_model_loads_the_weights_at_another_layout(name: str, rank: int, out: Path) -> None:
    """Expected: what an actor at tp 2 holds of the weights that went another way, through a HuggingFace directory."""
    spec = read_spec(role_of(name, out))
    loaded, expected = (torch.load(out / name / f"{what}_{rank}.pt") for what in ("rank", "expected"))
    assert loaded.keys() == expected.keys() and len(loaded) > 10
    for key, tensor in expected.items():
        rows = len(tensor)
        if key in ("embedding.word_embeddings.weight", "output_layer.weight"):  # a HuggingFace directory has no padding
            rows = min(rows, max(spec.vocab_size - rank * rows, 0))
        assert rows > 0 and same(loaded[key][:rows], tensor[:rows].to(loaded[key].dtype)), key
        assert loaded[key].isfinite().all(), "the padding too"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_megatron_loads_every_tensor_whole(name: str, rank: int, out: Path) -> None:
    spec, case = read_spec(role_of(name, out)), CASES[name][1]
    memory, plain = torch.load(out / name / "memory.pt"), torch.load(out / name / f"plain_{rank}.pt")
    moments = MOMENTS[case.optimizer] + (("fp32_param",) if case.dtype == "bfloat16" else ())
    expected_keys = {"optimizer.num_steps"}
    for weight in model_weights(spec, head_of(name)):
        key, layer = stored_at(weight)
        for prefix, what in (("", ""), *((f"optimizer.state.{moment}.", f"{moment} of ") for moment in moments)):
            expected_keys.add(prefix + key)
            found = plain[prefix + key] if layer is None else plain[prefix + key][layer]
            assert same(found, memory[what + weight.megatron]), f"{what}{weight.megatron}"
            if what and "linear" in weight.megatron:
                assert found.count_nonzero() > 0
    assert plain.keys() == expected_keys
    assert plain["optimizer.num_steps"].tolist() == [2.0 if case.optimizer == "adam" else 0.0]


# ------------------------------------------------------------------------------------------------ tools.convert


def converted(name: str, out: Path, target: Path) -> dict[str, Tensor]:
    to_huggingface(role_of(name, out), target)
    return tensors_of(target)


@pytest.mark.parametrize("name", [*ACTORS, "sgd"])
def test_an_actor_is_converted_to_what_the_run_exports(name: str, out: Path, tmp_path: Path) -> None:
    found, exported = converted(name, out, tmp_path / "hf"), tensors_of(out / name / "hf")
    assert found.keys() == exported.keys()
    assert all(same(x, exported[key]) for key, x in found.items())
    for file in (path for path in (out / name / "hf").iterdir() if path.suffix != ".safetensors"):
        assert (tmp_path / "hf" / file.name).read_bytes() == file.read_bytes(), file.name
    assert verify(role_of(name, out), out / name / "hf") == []


@pytest.mark.parametrize("name", CRITICS)
def test_a_critic_is_converted_to_what_it_had_in_memory(name: str, out: Path, tmp_path: Path) -> None:
    """Its score head too, which was none when it began from a policy."""
    spec, memory = read_spec(role_of(name, out)), torch.load(out / name / "memory.pt")
    assert spec.head == "score"
    found, expected = converted(name, out, tmp_path / "hf"), huggingface_form(memory, spec)
    assert found.keys() == expected.keys()
    assert all(same(x, expected[key]) for key, x in found.items())
    assert found["score.weight"].count_nonzero() > 0
    assert verify(role_of(name, out), tmp_path / "hf") == []


def huggingface_form(memory: dict[str, Tensor], spec: ModelSpec) -> dict[str, Tensor]:
    found = {}
    for weight in model_weights(spec, "score"):
        found |= dict(
            zip(
                weight.hf, whole_parts(weight, [memory[weight.megatron]], spec, Cut().places(weight.group)), strict=True
            )
        )
    return found


@pytest.mark.parametrize("name", [*ACTORS, *CRITICS])
def test_transformers_and_megatron_compute_the_same_of_both(
    name: str, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["megatron-to-hf", str(role_of(name, out)), str(tmp_path / "hf")]) == 0
    assert main(["verify", str(tmp_path / "hf"), str(role_of(name, out)), "--forward"]) == 0
    said = capsys.readouterr()
    assert "error" not in said.out + said.err


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("rank", [0, 1])
def test_a_role_that_does_not_fit_is_told_file_key_and_both(rank: int, out: Path) -> None:
    found = json.loads((out / f"errors_{rank}.json").read_text())
    actor, sgd = out / "float32/step_000001/actor/.metadata", out / "sgd/step_000001/actor/.metadata"

    def info(shape: tuple[int, ...], dtype: str = "float32") -> str:
        return f"TensorInfo(shape={shape}, dtype=torch.{dtype})"

    layers, embedding = "decoder.layers.self_attention.linear_qkv", "embedding.word_embeddings.weight"
    assert found == {
        "shape": f"{actor}: {layers}.layer_norm_weight is {info((2, 64))}, the model has {info((3, 64))}",
        "dtype": f"{actor}: {embedding} is {info((128, 64))}, the model has {info((128, 64), 'bfloat16')}",
        "optimizer": f"{sgd}: no tensor optimizer.state.exp_avg.{embedding}",
        "biases": f"{actor}: no tensor {layers}.bias",
        "head": f"{actor}: output_layer.weight is {info((128, 64))}, the model has {info((1, 64))}",
        "no new momentum": None,  # SGD begins with zeros
    }
