"""Which modules of `recompute` a model has, what a plan proposes, and what a start refuses."""

from pathlib import Path

import pytest

from hybridflow.architecture.spec import read_spec
from hybridflow.config.recompute import Recompute
from hybridflow.errors import ConfigError
from hybridflow.placement.placed import place
from hybridflow.placement.recomputation import check_recompute, further, modules_in, steps
from tests.distributed.cases import GROUPS, SGD, Case
from tests.distributed.parity_worker import experiment
from tests.tiny_models import make_checkpoints

SHAPES = Path(__file__).resolve().parents[2] / "configs" / "shapes"
EVERY = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts")


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("llama-3-8b", EVERY[:3]),
        ("olmo-3-7b", ("core_attn", "mlp")),  # norms behind attention and MLP
        ("qwen3-30b-a3b", ("core_attn", "layernorm", "moe", "moe_act")),  # every layer is a mixture
        ("glm-4.5-air", EVERY),
        ("moonlight-16b-a3b", EVERY),
        ("qwen3.5-35b-a3b", ("core_attn", "layernorm", "moe", "moe_act", "shared_experts")),
    ],
)
def test_the_modules_of_a_model(name: str, modules: tuple[str, ...]) -> None:
    spec = read_spec(SHAPES / name)
    assert modules_in(spec) == modules
    check_recompute("actor.recompute", modules, spec)
    for module in set(EVERY) - set(modules):
        with pytest.raises(ConfigError) as raised:
            check_recompute("actor.recompute", ("core_attn", module), spec)
        said = str(raised.value)
        assert f"actor.recompute = [core_attn,{module}]: {spec.path} has no " in said
        assert said.endswith(
            f"{module} means nothing; its modules are {', '.join(modules)}. Set actor.recompute=[core_attn]"
        )


@pytest.mark.parametrize(
    ("name", "lists"),
    [
        ("llama-3-8b", [("core_attn", "layernorm", "mlp")]),
        ("qwen3-30b-a3b", [("core_attn", "layernorm", "moe_act"), ("core_attn", "layernorm", "moe")]),
        ("glm-4.5-air", [("core_attn", "layernorm", "moe_act"), ("core_attn", "layernorm", "mlp", "moe")]),
    ],
)
def test_steps_from_nothing_to_whole_layers(name: str, lists: list[Recompute]) -> None:
    spec = read_spec(SHAPES / name)
    assert steps(spec) == ("none", "selective", *lists, "full")
    assert further("none", spec) == ("selective", *lists, "full")
    assert further("selective", spec) == (*lists, "full")
    assert further(lists[-1], spec) == ("full",)
    assert further("full", spec) == ()
    assert further(("layernorm",), spec) == (*lists, "full")
    if spec.num_experts:  # `moe` has the activation in it
        assert further(lists[0], spec) == (lists[1], "full")


def test_a_start_names_the_module_that_a_model_lacks(tmp_path: Path) -> None:
    models = make_checkpoints(tmp_path / "llama", family="llama", tied=False)
    config = experiment(GROUPS, Case(recompute=("layernorm", "moe")), models, SGD, 64)
    with pytest.raises(ConfigError, match=r"actor.recompute = \[layernorm,moe\]: .* has no experts"):
        place(config, 1)
