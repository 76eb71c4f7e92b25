"""What a value model puts on top of its last layer, in a process of its own, since megatron wants a process group;
and which layers a model is made of.
"""

import functools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from hybridflow.architecture.spec import read_spec
from hybridflow.convert.forward import packed_micro_batch, random_prompts
from hybridflow.models import build, layer_classes, layer_specs
from hybridflow.models.attention import GroupedSelfAttention, PackedAttention, PackedSequences
from hybridflow.models.layer_specs import PostNormLayer
from hybridflow.models.layers import RMSNorm, WideHeadNorm, ZeroCenteredHeadNorm
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.grid import Grid, ProcessGroups
from hybridflow.parallel.layout import Layout, Place
from tests.bench.output_layer import SPEC
from tests.tiny_models import make_checkpoints

ROOT = Path(__file__).resolve().parents[2]
FLOAT32: Any = SimpleNamespace(
    params_dtype=torch.float32, attention_backend=AttnBackend.auto, recompute_granularity=None
)


@pytest.fixture(scope="module")
def bfloat16_values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    reward = make_checkpoints(tmp_path_factory.mktemp("build"), family="qwen2", tied=False) / "reward"
    command = [sys.executable, "-m", "tests.models.test_build", str(reward)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.thorough
def test_a_value_is_the_float32_product_of_bfloat16_hidden_states_and_weights(bfloat16_values: dict) -> None:
    hidden, weight = (torch.tensor(bfloat16_values[name]) for name in ("hidden", "weight"))
    values = torch.tensor(bfloat16_values["values"])
    assert torch.equal(hidden.bfloat16().float(), hidden) and torch.equal(weight.bfloat16().float(), weight)
    assert torch.equal(values, (hidden @ weight.t()).squeeze(-1))
    assert not torch.equal(values, values.bfloat16().float()), "values that 8 bits could hold as well"


@pytest.mark.slow
def test_the_gradient_of_a_value_is_its_weight(bfloat16_values: dict) -> None:
    """d value / d hidden = weight, d value / d weight = hidden; both are bfloat16 as the tensors are."""
    hidden, weight = (torch.tensor(bfloat16_values[name]) for name in ("hidden", "weight"))
    assert torch.equal(torch.tensor(bfloat16_values["hidden_grad"]), weight.expand_as(hidden))
    assert torch.equal(torch.tensor(bfloat16_values["weight_grad"]), hidden.sum(0, keepdim=True).bfloat16().float())


def test_megatron_gets_the_kernel_of_attention_by_its_own_name() -> None:
    grid: Any = SimpleNamespace(tp=1, pp=1, layout=Layout(1, 1, 1, (0,)))
    named: dict[str, Any] = {"dtype": "bfloat16", "sequence_parallel": False, "recompute": "none"}
    for arguments, backend in (({"attention_backend": "fused"}, AttnBackend.fused), ({}, AttnBackend.auto)):
        config = layer_specs.transformer_config(SPEC, grid, **named, arguments=arguments)
        assert config.attention_backend is backend


@pytest.mark.parametrize(
    ("cuda", "engine", "apex", "layers", "output_layer"),
    [
        (False, False, False, False, False),
        (True, False, False, False, False),
        (True, False, True, True, True),
        (True, True, False, True, False),
        (True, True, True, True, True),
    ],
)
def test_who_adds_gradients_within_products(
    cuda: bool, engine: bool, apex: bool, layers: bool, output_layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformer Engine's layers need no apex; the output layer, which is megatron's, does."""
    monkeypatch.setattr(layer_classes, "uses_cuda", lambda: cuda)
    monkeypatch.setattr(layer_classes, "HAVE_APEX", apex)
    found = layer_classes.device_arguments(engine=engine, gated=True)["gradient_accumulation_fusion"]
    config: Any = SimpleNamespace(gradient_accumulation_fusion=found)
    assert found == layers
    assert layer_classes.output_layer_config(config).gradient_accumulation_fusion == output_layer
    assert config.gradient_accumulation_fusion == layers, "the layers' config stays"


def test_a_transformer_engine_that_cannot_be_imported_is_as_good_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built against another torch it is found and fails as it loads; megatron then has no layers of its kind."""
    (tmp_path / "transformer_engine.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(layer_classes, "uses_cuda", lambda: True)
    spec = read_spec(make_checkpoints(tmp_path, family="qwen2", tied=False) / "policy")
    (layer,) = layer_specs.block_spec(spec, (0,), FLOAT32, Place(1, 0)).layer_specs
    assert layer.submodules.input_layernorm is RMSNorm
    assert layer_specs.submodules(layer.submodules.mlp, MLPSubmodules).linear_fc1.__name__ == "ColumnParallelLinear"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "olmo3"])
def test_norms_of_heads_are_made_by_our_attention_alone(family: str, tmp_path: Path) -> None:
    """megatron gets none, which 0.16.1 would make without config.qk_layernorm and 0.19.2 only with it."""
    spec = read_spec(make_checkpoints(tmp_path, family=family, tied=False) / "policy")
    (layer,) = layer_specs.block_spec(spec, (0,), FLOAT32, Place(1, 0)).layer_specs
    attention = layer.submodules.self_attention
    assert attention.submodules.q_layernorm is attention.submodules.k_layernorm is IdentityOp
    head_norms = attention.params["head_norms"]
    if family == "olmo3":
        assert [(norm.func, norm.keywords["heads"]) for norm in head_norms] == [
            (WideHeadNorm, spec.num_heads),
            (WideHeadNorm, spec.num_kv_heads),
        ]
    else:
        one = {"qwen3": layer_classes.layer_classes().rms_norm, "gemma3": ZeroCenteredHeadNorm}.get(family)
        assert head_norms == (None if one is None else (one, one))


def test_the_parts_of_a_spec_are_found_however_megatron_gives_them() -> None:
    """0.16.1 gives a ModuleSpec, 0.19.2 of a dense MLP a function that knows its parts."""
    parts = MLPSubmodules(linear_fc1=torch.nn.Linear, linear_fc2=torch.nn.Linear)
    for spec in (ModuleSpec(MLP, submodules=parts), functools.partial(MLP, submodules=parts)):
        assert layer_specs.submodules(spec, MLPSubmodules) is parts
    for spec in (ModuleSpec(MLP), functools.partial(MLP), MLP, ModuleSpec(MLP, submodules=object())):
        with pytest.raises(AssertionError, match="has no MLPSubmodules"):
            layer_specs.submodules(spec, MLPSubmodules)


def chunk_of(*mixers: torch.nn.Module) -> build.PackedModel:
    """Of layers that mix tokens by these."""
    layers = []
    for number, mixer in enumerate(mixers, 1):
        layer = TransformerLayer.__new__(TransformerLayer)
        torch.nn.Module.__init__(layer)
        layer.layer_number, layer.self_attention = number, mixer
        layers.append(layer)
    model = build.PackedModel.__new__(build.PackedModel)
    torch.nn.Module.__init__(model)
    model.decoder = torch.nn.Module()
    model.decoder.layers, model.layers = torch.nn.ModuleList(layers), tuple(range(len(layers)))
    return model


class GatedDeltaNet(torch.nn.Module):
    """megatron's looks at cu_seqlens only where qkv_format is "thd"."""


def our_attention(core: type[torch.nn.Module]) -> GroupedSelfAttention:
    made = GroupedSelfAttention.__new__(GroupedSelfAttention)
    torch.nn.Module.__init__(made)
    made.core_attention = core.__new__(core)
    torch.nn.Module.__init__(made.core_attention)
    return made


def test_what_does_not_know_where_packed_sequences_end_is_refused() -> None:
    """State would go from one sample into the next, without an error."""
    assert PackedSequences.from_lengths((3, 2), torch.device("cpu")).qkv_format is None
    ours = our_attention(PackedAttention)
    assert [layer.layer_number for layer in chunk_of(ours, ours)._checked_layers()] == [1, 2]
    with pytest.raises(AssertionError, match="GatedDeltaNet: would mix the tokens of packed sequences"):
        chunk_of(ours, GatedDeltaNet())._checked_layers()
    with pytest.raises(AssertionError, match="would mix the tokens"):
        chunk_of(our_attention(GatedDeltaNet))._checked_layers()


def test_layers_with_norms_after_the_sums_are_made_of_megatrons_local_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformer Engine's linear layers have a norm in front of them."""
    monkeypatch.setattr(layer_specs, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(layer_classes, "has_transformer_engine", lambda: True)
    spec = read_spec(make_checkpoints(tmp_path, family="opt_350m", tied=True) / "policy")
    block = layer_specs.block_spec(spec, (0,), FLOAT32, Place(1, 0))
    (layer,) = block.layer_specs
    assert (layer.module, block.layer_norm) == (PostNormLayer, None)
    assert layer.submodules.input_layernorm is layer.submodules.pre_mlp_layernorm is IdentityOp
    assert layer_specs.submodules(layer.submodules.mlp, MLPSubmodules).linear_fc1.__name__ == "ColumnParallelLinear"
    assert layer.submodules.self_attention.submodules.linear_qkv.__name__ == "ColumnParallelLinear"


def measure(model: str) -> dict[str, list]:
    platform = platforms.start(seed=0)
    spec, grid = read_spec(Path(model)), Grid.build(Layout(1, 1, 1, (0,)), ProcessGroups())
    options = dict(dtype="bfloat16", sequence_parallel=False, recompute="none", device=platform.device)
    (chunk,) = build.build_model(spec, grid, head="score", **options)
    seen, outputs = [], chunk.outputs

    def listening(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.detach().requires_grad_())
        return outputs(seen[0])

    chunk.outputs = listening
    values = chunk(packed_micro_batch(random_prompts(spec, seed=0), platform.device))
    values.sum().backward()
    weight = chunk.output_layer.weight
    found = {"hidden": seen[0], "weight": weight, "values": values}
    found |= {"hidden_grad": seen[0].grad, "weight_grad": weight.grad}
    platforms.stop()
    return {name: x.float().tolist() for name, x in found.items()}


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
