"""What a role's section `lora` comes to for a model: names, conflicts, and a directory of PEFT."""

import json
import re
from pathlib import Path

import pytest

from hybridflow.architecture.lora import Lora
from hybridflow.architecture.peft_directory import BASE
from hybridflow.architecture.spec import read_spec
from hybridflow.config.files import as_flow
from hybridflow.config.lora import LoraConfig
from hybridflow.errors import ConfigError
from hybridflow.placement.adapters import linear_layers, read_lora
from tests.peft_models import save_adapter
from tests.tiny_models import make_checkpoints

KEY = "actor.lora"
MLP = ["gate_proj", "up_proj", "down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def model(root: Path, family: str) -> Path:
    if not (root / family).exists():
        make_checkpoints(root / family, family=family, tied=False)
    return root / family / "policy"


def read(root: Path, family: str = "qwen3", **given: object) -> Lora:
    return read_lora(KEY, LoraConfig.model_validate(given), read_spec(model(root, family)), 5)


def refused(root: Path, family: str = "qwen3", **given: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read(root, family, **given)
    return str(caught.value)


def test_what_is_left_out_has_the_usual_values(root: Path) -> None:
    assert read(root) == Lora(32, 32.0, None, seed=5)
    assert read(root, target_modules="all-linear", rank=8) == Lora(8, 32.0, None, seed=5)
    assert read(root, target_modules="q_proj").targets == ("q_proj",), "a name alone"
    given = {"target_modules": ["self_attn.q_proj", "up_proj"], "exclude_modules": "up_proj", "use_rslora": True}
    assert read(root, **given) == Lora(32, 32.0, ("self_attn.q_proj", "up_proj"), ("up_proj",), True, seed=5)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("qwen3", ATTENTION + MLP),
        ("glm", [*ATTENTION, "gate_up_proj", "down_proj"]),
        ("opt", ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]),
        ("qwen3_moe", ATTENTION),
        ("mixtral", ATTENTION),
    ],
)
def test_the_linear_layers_of_a_family(family: str, names: list[str], root: Path) -> None:
    """Neither routers, nor routed experts, nor the output layer."""
    found = linear_layers(read_spec(model(root, family)))
    assert [name.rpartition(".")[2] for name in found] == names


def test_the_linear_layers_of_a_mixture_with_dense_layers_and_shared_experts(root: Path) -> None:
    found = {name.partition("{layer}.")[2] for name in linear_layers(read_spec(model(root, "glm4_moe")))}
    expected = {f"self_attn.{name}" for name in ATTENTION}
    assert found == expected | {f"{where}.{name}" for where in ("mlp", "mlp.shared_experts") for name in MLP}


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules"])
def test_a_name_that_is_none(field: str, root: Path) -> None:
    found = refused(root, **{field: ["q_proj", "qproj"]})
    assert found.startswith(f"actor.lora.{field}: qproj names no linear layer of {model(root, 'qwen3')}")
    can = "these can: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    assert found.endswith(f"{can}. Set actor.lora.{field}=[q_proj]")


@pytest.mark.parametrize(
    ("family", "name"), [("qwen3_moe", "gate_proj"), ("mixtral", "w1"), ("glm4_moe", "gate"), ("qwen3", "lm_head")]
)
def test_routed_experts_routers_and_the_output_layer_have_none(family: str, name: str, root: Path) -> None:
    assert f"{name} names no linear layer" in refused(root, family, target_modules=[name])


def test_an_exclusion_that_leaves_nothing(root: Path) -> None:
    found = refused(root, target_modules=["q_proj"], exclude_modules=["self_attn.q_proj"])
    why = "actor.lora.exclude_modules = ['self_attn.q_proj'] leaves no linear layer with an adapter"
    assert found == f"{why}. Set actor.lora.exclude_modules=[]"


def test_a_directory_of_peft_says_all(root: Path, tmp_path: Path) -> None:
    peft = tmp_path / "peft"
    save_adapter(model(root, "qwen3"), peft, ("q_proj", "v_proj"), r=8, lora_alpha=12, use_rslora=True)
    expected = Lora(8, 12.0, ("self_attn.q_proj", "self_attn.v_proj"), use_rslora=True, path=peft)
    assert read(root, adapter_path=str(peft)) == expected
    assert read(root, adapter_path=str(peft), rank=8, alpha=12, use_rslora=True) == expected
    for field, value, theirs in (("rank", 16, 8), ("alpha", 8.0, 12.0), ("use_rslora", False, True)):
        found = refused(root, adapter_path=str(peft), **{field: value})
        told = f"actor.lora.{field} = {value}: the adapters of actor.lora.adapter_path = {peft} have {theirs}."
        assert found.startswith(told), found
    found = refused(root, "opt", adapter_path=str(peft))
    assert found.startswith("actor.lora.adapter_path: ") and "which is no linear layer of" in found


def test_adapters_go_on_with_the_positions_that_they_were_trained_with(root: Path, tmp_path: Path) -> None:
    """Under either name of the rotary embedding."""
    save_adapter(model(root, "qwen3"), tmp_path / "peft", ("q_proj", "v_proj"))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    recorded = {"max_position_embeddings": 64, "rope_scaling": yarn}
    given = LoraConfig(adapter_path=str(tmp_path / "peft"))
    positions: list[dict[str, object]] = [
        recorded,
        {"max_position_embeddings": 64, "rope_parameters": yarn},
        {},
        {**recorded, "max_position_embeddings": 32},
        {**recorded, "rope_scaling": {**yarn, "factor": 8.0}},
    ]
    specs = [read_spec(model(root, "qwen3"), overrides=overrides) for overrides in positions]
    plain = [read_lora(KEY, given, spec, 5) for spec in specs]
    (tmp_path / "peft" / BASE).write_text(json.dumps({"hf_overrides": recorded}))
    assert [read_lora(KEY, given, spec, 5) for spec in specs[:2]] == plain[:2]
    for overrides, spec in zip(positions[2:], specs[2:], strict=True):
        with pytest.raises(ConfigError) as caught:
            read_lora(KEY, given, spec, 5)
        assert str(caught.value) == (
            f"actor.hf_overrides = {as_flow(overrides)}: the adapters of {KEY}.adapter_path = {tmp_path / 'peft'} were "
            "trained with {max_position_embeddings: 64, rope_scaling: {rope_type: yarn, factor: 4.0, "
            "original_max_position_embeddings: 16}}. Set actor.hf_overrides={max_position_embeddings: 64, "
            "rope_scaling: {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 16}}, or merge the "
            "adapters by `hybridflow convert` and train the merged model"
        )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"target_modules": []}, "target_modules = []: names no linear layer"),
        (
            {"adapter_path": "x", "target_modules": ["q_proj"]},
            "target_modules = [q_proj] cannot go with adapter_path = x: the adapters of",
        ),
        (
            {"adapter_path": "x", "exclude_modules": ["q_proj"]},
            "exclude_modules = [q_proj] cannot go with adapter_path = x: the adapters of",
        ),
        ({"rank": 0}, "rank"),
        ({"alpha": 0}, "alpha"),
        ({"target_modules": [""]}, "target_modules"),
        ({"target_modules": 3}, "target_modules"),
    ],
)
def test_a_section_that_is_none(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match="validation error") as caught:
        LoraConfig.model_validate(given)
    assert said in str(caught.value)


@pytest.mark.parametrize("saved", [{"modules_to_save": ["score"]}, {}])
def test_adapters_of_a_classifier_are_none_of_an_actor(saved: dict[str, list[str]], root: Path, tmp_path: Path) -> None:
    save_adapter(model(root, "qwen3"), tmp_path / "peft", ("q_proj",), head="score", **saved)
    given = LoraConfig(adapter_path=str(tmp_path / "peft"))
    said = (
        f"{KEY}.adapter_path = {tmp_path / 'peft'}: adapter_config.json has task_type = 'SEQ_CLS' and modules_to_save ="
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        read_lora(KEY, given, read_spec(model(root, "qwen3")), 5)
    assert read_lora("critic.lora", given, read_spec(model(root, "qwen3")), 5).targets == ("self_attn.q_proj",)
