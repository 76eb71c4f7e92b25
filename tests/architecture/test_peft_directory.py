"""Directories that PEFT writes: what is read from them, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from hybridflow.architecture.lora import Lora
from hybridflow.architecture.peft_directory import (
    BASE,
    AdapterFile,
    Adapters,
    adapter_config,
    adapter_names,
    is_other_base,
    left_out_by_peft,
    lora_of_directory,
    recorded_overrides,
    write_adapter,
    write_adapter_config,
)
from hybridflow.architecture.spec import read_spec
from hybridflow.architecture.weights import model_weights
from hybridflow.errors import CheckpointError, ConfigError
from tests.peft_models import (
    ATTENTION,
    TARGETS,
    change,
    change_tensors,
    model_of,
    save_adapter,
    save_as_run,
    write_by_hand,
)
from tests.tiny_models import make_checkpoints

KEY = "actor.lora.adapter_path"
Q1 = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoints(tmp_path_factory.mktemp("base"), family="qwen3", tied=False) / "policy"


@pytest.fixture
def peft(base: Path, tmp_path: Path) -> Path:
    save_adapter(base, tmp_path / "peft", ("q_proj", "down_proj"))
    return tmp_path / "peft"


def refused(peft: Path, base: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        lora_of_directory(peft, read_spec(base), KEY)
    found = str(caught.value)
    assert found.startswith(KEY) and str(peft) in found
    return found


@pytest.mark.parametrize("rslora", [False, True])
def test_what_a_directory_says(rslora: bool, base: Path, tmp_path: Path) -> None:
    path = tmp_path / "peft"
    save_adapter(base, path, ("q_proj", "down_proj"), r=16, lora_alpha=8, use_rslora=rslora)
    targets = ("mlp.down_proj", "self_attn.q_proj")
    lora = lora_of_directory(path, read_spec(base), KEY)
    assert lora == Lora(16, 8.0, targets, use_rslora=rslora, path=path) and lora.scale == (2.0 if rslora else 0.5)
    tensors, adapters = load_file(path / "adapter_model.safetensors"), Adapters(lora)
    for end in ("lora_A.weight", "lora_B.weight"):
        expected = tensors[f"base_model.model.{Q1}.{end}"]
        assert torch.equal(adapters.read(f"{Q1}.{end}", tuple(expected.shape)), expected)
        part = adapters.read(f"{Q1}.{end}", tuple(expected.shape), slice(1, 3), slice(2, 4))
        assert torch.equal(part, expected[1:3, 2:4])
    other = adapters.read("model.layers.1.self_attn.k_proj.lora_A.weight", (16, 64))
    assert other.shape == (16, 64) and not other.any(), "beside a layer with adapters, and without any"


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (r".*layers\.\d+\.self_attn\.[qk]_proj", ("self_attn.k_proj", "self_attn.q_proj")),
        ("all-linear", tuple(sorted(f"self_attn.{x}" for x in ATTENTION))),
    ],
)
def test_targets_by_a_pattern(targets: str, found: tuple[str, ...], base: Path, tmp_path: Path) -> None:
    """PEFT keeps a pattern as text: the tensors tell the names."""
    save_adapter(base, tmp_path / "peft", targets)
    named = lora_of_directory(tmp_path / "peft", read_spec(base), KEY).targets
    assert named is not None
    if targets == "all-linear":
        found = tuple(sorted((*found, *(f"mlp.{x}_proj" for x in ("gate", "up", "down")))))
    assert named == found


def test_a_value_head_is_read_from_the_directory(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "peft"
    save_adapter(base, path, ("q_proj",), head="score", modules_to_save=["score"])
    assert json.loads((path / "adapter_config.json").read_text())["modules_to_save"] is not None
    adapters = Adapters(lora_of_directory(path, read_spec(base), KEY))
    expected = load_file(path / "adapter_model.safetensors")["base_model.model.score.weight"]
    assert "score.weight" in adapters and torch.equal(adapters.read("score.weight", (1, 64)), expected)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"),
        ("use_dora", True),
        ("bias", "lora_only"),
        ("rank_pattern", {"q_proj": 2}),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [1]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("init_lora_weights", "olora"),
        ("r", None),
        ("r", True),
        ("lora_alpha", -1),
    ],
)
def test_what_is_not_supported_is_named(field: str, value: object, peft: Path, base: Path) -> None:
    change(peft, **{field: value})
    assert f"adapter_config.json has {field} = {value!r}" in refused(peft, base)


def test_a_directory_without_a_config_or_with_a_damaged_one(peft: Path, base: Path) -> None:
    (peft / "adapter_config.json").write_text("{")
    assert "adapter_config.json is not JSON" in refused(peft, base)
    (peft / "adapter_config.json").unlink()
    assert "no adapter_config.json there" in refused(peft, base)


def test_weights_that_are_a_pickle_or_not_there(peft: Path, base: Path) -> None:
    (peft / "adapter_model.safetensors").unlink()
    assert refused(peft, base).endswith("adapter_model.safetensors: no such file")
    (peft / "adapter_model.bin").write_bytes(b"")
    assert "adapter_model.bin is a pickle: save the adapter with safe_serialization=True" in refused(peft, base)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({f"{Q1}.lora_A.weight": None}, f"{Q1} has no lora_A.weight"),
        (
            {f"{Q1}.lora_A.weight": None, f"{Q1}.lora_B.weight": None},
            f"has adapters of self_attn.q_proj, and none of {Q1}",
        ),
        ({f"{Q1}.lora_A.weight": torch.zeros(8, 64)}, f"{Q1}.lora_A.weight has shape (8, 64), not (4, 64): r = 4"),
        ({f"{Q1}.lora_B.weight": torch.zeros(64, 8)}, f"{Q1}.lora_B.weight has shape (64, 8), not (64, 4): r = 4"),
        ({f"{Q1}.lora_magnitude_vector": torch.zeros(64)}, f"{Q1}.lora_magnitude_vector is no matrix of LoRA"),
        (
            {f"lm_head.{end}": torch.zeros(4, 4) for end in ("lora_A.weight", "lora_B.weight")},
            "has an adapter of lm_head, which is no linear layer of",
        ),
        (
            {f"model.layers.7.self_attn.q_proj.{end}": torch.zeros(4, 4) for end in ("lora_A.weight", "lora_B.weight")},
            "has an adapter of model.layers.7.self_attn.q_proj, which is no linear layer of",
        ),
    ],
    ids=["no A", "some layers", "rank of A", "rank of B", "a vector", "output layer", "beyond the layers"],
)
def test_tensors_that_do_not_fit(changes: dict[str, torch.Tensor | None], said: str, peft: Path, base: Path) -> None:
    change_tensors(peft, changes)
    assert said in refused(peft, base)


def test_names_without_the_prefix_of_peft(base: Path, tmp_path: Path) -> None:
    """PEFT itself would only warn, and leave B at zero."""
    path = write_by_hand(base, tmp_path / "peft", {Q1: (64, 64)})
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"base_model.model.model.", b"base.model.model.model."))
    with pytest.raises(
        CheckpointError, match=r"base.model.model.model.layers.1\S* does not begin with base_model.model."
    ):
        AdapterFile(path)


def test_a_directory_that_is_written_is_read_again(base: Path, tmp_path: Path) -> None:
    """The names that tell PEFT are short, and of the adapted layers alone."""
    spec = read_spec(base)
    spec = replace(spec, lora=Lora(4, 6.0, None, ("k_proj", "mlp.up_proj"), use_rslora=True))
    assert adapter_config(spec, "lm")["target_modules"] == ["down_proj", "gate_proj", "o_proj", "q_proj", "v_proj"]
    shapes = {name: (4, 64) for name in adapter_names(spec, "lm")}
    save_adapter(base, tmp_path / "peft", ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"))
    expected = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert {f"base_model.model.{name}" for name in shapes} == expected.keys()
    write_adapter(tmp_path / "ours", {name: expected[f"base_model.model.{name}"] for name in shapes}, spec, "lm")
    written = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    lora = lora_of_directory(tmp_path / "ours", read_spec(base), KEY)
    assert (lora.rank, lora.alpha, lora.use_rslora) == (4, 6.0, True)
    assert lora.targets == lora_of_directory(tmp_path / "peft", read_spec(base), KEY).targets


def test_what_the_adapters_were_trained_beside_is_recorded(base: Path, tmp_path: Path) -> None:
    """Digest and hf_overrides in one file; none where there is neither."""
    overrides, other = {"max_position_embeddings": 400}, make_checkpoints(tmp_path, family="qwen3", tied=False)
    for given, digest, expected in (
        ({}, None, None),
        ({}, "ab", {"base_weights": "ab"}),
        (overrides, None, {"hf_overrides": overrides}),
        (overrides, "ab", {"base_weights": "ab", "hf_overrides": overrides}),
    ):
        spec = replace(read_spec(base, overrides=given), lora=Lora(4, 6.0))
        (directory := tmp_path / f"{len(given)}{digest}").mkdir()
        write_adapter_config(directory, spec, "lm", digest)
        found = json.loads((directory / BASE).read_text()) if (directory / BASE).exists() else None
        assert (found, recorded_overrides(directory)) == (expected, given)
        assert is_other_base(directory, other / "policy") == (digest is not None)
    for text, said in (('{"hf_overrides": 3}', "hf_overrides = 3 must be an object"), ("{", "is not JSON")):
        (directory / BASE).write_text(text)
        with pytest.raises(CheckpointError, match=f"base_weights.json: {said}.*copy the file from the run again"):
            recorded_overrides(directory)


@pytest.mark.parametrize("family", ["glm", "opt", "glm4_moe"])
def test_a_checkpoint_of_a_run_is_such_a_directory(family: str, tmp_path: Path) -> None:
    """The same matrices at the same names, and zeros where a layer beside has none."""
    base = make_checkpoints(tmp_path, family=family, tied=False) / "policy"
    save_adapter(base, tmp_path / "peft", [name for name in TARGETS[family] if name != "k_proj"])
    run = save_as_run(tmp_path / "peft", base, tmp_path / "actor")
    spec = read_spec(base)
    one, other = (lora_of_directory(path, spec, KEY) for path in (tmp_path / "peft", run))
    assert (one.rank, one.alpha, other.path) == (other.rank, other.alpha, run)
    names = adapter_names(replace(spec, lora=one), "lm")
    assert names == adapter_names(replace(spec, lora=other), "lm") and not any("k_proj" in name for name in names)
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    for name in names:
        expected = tensors[f"base_model.model.{name}"]
        assert torch.equal(Adapters(other).read(name, tuple(expected.shape)), expected), name
    layer = "model.decoder.layers" if family == "opt" else "model.layers"
    beside = Adapters(other).read(f"{layer}.0.self_attn.k_proj.lora_A.weight", (4, 64))
    assert not beside.any()


@pytest.mark.parametrize(
    ("family", "left_out"),
    [*dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "glm4_moe"), 6).items(), ("qwen3_5_moe", 0), ("qwen3", 0)],
)
def test_what_peft_leaves_out_is_told(family: str, left_out: int, tmp_path: Path) -> None:
    """The first layer's MLP and the shared expert of a mixture, whose names PEFT takes for the routed experts'."""
    base = make_checkpoints(tmp_path, family=family, tied=False) / "policy"
    spec = replace(read_spec(base), lora=Lora(2, 4.0))
    shapes = {n: s for w in model_weights(spec, "lm") if w.adapter for n, s in zip(w.hf, w.shapes(spec), strict=True)}
    tensors = {name: torch.full(shapes[name], 7.0) for name in adapter_names(spec, "lm")}
    write_adapter(tmp_path / "adapter", tensors, spec, "lm")
    model = PeftModel.from_pretrained(model_of(base), tmp_path / "adapter")
    read = [name for name, x in model.named_parameters() if "lora_A" in name and bool((x == 7).all())]
    modules = [name for name in tensors if name.endswith("lora_A.weight")]
    assert len(modules) - len(read) == left_out
    told, first = left_out_by_peft(spec, "lm"), "model.layers.0.mlp.gate_proj"
    assert (told is None) == (not left_out)
    assert told is None or f"{left_out} of the {len(modules)} adapters, such as that of {first}:" in told
