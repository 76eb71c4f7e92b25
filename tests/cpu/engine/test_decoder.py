"""Which of vLLM's layers become one call; what they give is compared in tests/distributed/test_engine.py."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hybridflow.cpu.engine import decoder
from hybridflow.cpu.engine.decoder import decoder_in_c
from hybridflow.cpu.kernels.decoder import Keys

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("needs_kernels")]
WIDTH, HEADS, DIMS, HIDDEN, MOST = 32, 2, 16, 48, 4


class Theirs:
    def forward(self, positions: object, hidden_states: object, residual: object, **others: object) -> str:
        return "theirs"


def norm(size: int, **changes: object) -> Any:
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(size))
    module.has_weight, module.variance_size_override, module.variance_epsilon = True, None, 1e-5
    for name, value in changes.items():
        setattr(module, name, value)
    return module


def rotation(**changes: object) -> Any:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    class Plain(RotaryEmbedding):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.cos_sin_cache = torch.cat((torch.ones(8, DIMS // 2), torch.zeros(8, DIMS // 2)), 1)
            self.rotary_dim, self.is_neox_style = DIMS, True

    made = Plain()
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def layer() -> Any:
    linear = {
        "qkv_proj": nn.Linear(WIDTH, 3 * HEADS * DIMS, bias=False),
        "o_proj": nn.Linear(HEADS * DIMS, WIDTH),
        "gate_up_proj": nn.Linear(WIDTH, 2 * HIDDEN, bias=False),
        "down_proj": nn.Linear(HIDDEN, WIDTH, bias=False),
    }
    linear["o_proj"].tp_size = 1
    attention = SimpleNamespace(
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_size=DIMS,
        impl=SimpleNamespace(scale=0.25),
        query_quant=None,
        kv_sharing_target_layer_name=None,
        layer_name="a layer",
    )
    made = Theirs()
    made.input_layernorm, made.post_attention_layernorm = norm(WIDTH), norm(WIDTH)
    made.self_attn = SimpleNamespace(
        qkv_proj=linear["qkv_proj"], o_proj=linear["o_proj"], rotary_emb=rotation(), attn=attention
    )
    made.mlp = SimpleNamespace(gate_up_proj=linear["gate_up_proj"], down_proj=linear["down_proj"])
    return made


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The layer's, in a step of one sequence without keys before it; up to MOST tokens are few."""
    from hybridflow.rollout.patches import prepare_vllm

    prepare_vllm()
    cache = torch.zeros(1, HEADS, 16, 2 * DIMS)

    def keys(attention: object, tokens: int) -> Keys:
        numbers = [torch.tensor(x, dtype=torch.int32) for x in ([[0]], [0, tokens], [tokens])]
        return Keys(cache, *numbers, torch.arange(tokens), tokens)

    monkeypatch.setattr(decoder, "most_rows", lambda dtype, inner: MOST)

    def run(layer: Any, tokens: int = 3, x: torch.Tensor | None = None, **others: object) -> Any:
        monkeypatch.setattr(decoder, "_keys", lambda attention: keys(attention, tokens))
        x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(1)) if x is None else x
        return decoder_in_c(Theirs)["forward"](layer, torch.arange(tokens), x, None, **others)

    return run


def test_a_layer_of_few_tokens_is_one_call(forward: Any) -> None:
    """With weights of zero the sum is what came and the bias of o_proj, and nothing goes on from there."""
    made = layer()
    for module in (made.self_attn.qkv_proj, made.self_attn.o_proj, made.mlp.down_proj):
        nn.init.zeros_(module.weight)
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    y, residual = forward(made, x=x.clone())
    assert torch.equal(y, torch.zeros(3, WIDTH))
    assert torch.equal(residual, x + made.self_attn.o_proj.bias)


def test_the_weights_are_those_of_now(forward: Any) -> None:
    """A hand-off may have moved them since the layer was asked what it is."""
    made = layer()
    before = forward(made)
    made.mlp.down_proj.weight.data = torch.zeros(WIDTH, HIDDEN)
    after = forward(made)
    assert before[0].abs().max() > 0 and after[0].abs().max() == 0
    assert torch.equal(before[1], after[1])


def test_many_tokens_and_none_stay_vllms(forward: Any) -> None:
    assert forward(layer(), MOST) != "theirs"
    assert forward(layer(), MOST + 1) == "theirs"
    assert forward(layer(), 0) == "theirs"


def test_a_step_without_keys_and_further_arguments_stay_vllms(forward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert forward(layer(), t_cond=None) != "theirs"
    assert forward(layer(), t_cond=torch.ones(1)) == "theirs"
    monkeypatch.setattr(decoder, "_keys", lambda attention: None)
    x = torch.ones(2, WIDTH)
    assert decoder_in_c(Theirs)["forward"](layer(), torch.arange(2), x, None) == "theirs"


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("", "ada_rms_norm_t_cond", nn.Identity()),
        ("", "input_layernorm", norm(WIDTH, has_weight=False)),
        ("", "post_attention_layernorm", norm(WIDTH, variance_size_override=16)),
        ("", "post_attention_layernorm", norm(WIDTH, variance_epsilon=1e-6)),
        ("self_attn", "q_norm", norm(DIMS)),  # and none of keys
        ("self_attn", "do_llama_4_scaling", True),
        ("self_attn.o_proj", "tp_size", 2),
        ("self_attn.rotary_emb", "is_neox_style", False),
        ("self_attn", "rotary_emb", SimpleNamespace(is_neox_style=True, rotary_dim=DIMS)),
        ("self_attn.attn", "query_quant", object()),
        ("self_attn.attn", "kv_sharing_target_layer_name", "another"),
        ("mlp", "down_proj", nn.Linear(HIDDEN, WIDTH, bias=False, dtype=torch.bfloat16)),
    ],
)
def test_what_the_kernel_does_not_know_stays_vllms(forward: Any, part: str, name: str, value: object) -> None:
    made = layer()
    owner = made
    for step in filter(None, part.split(".")):
        owner = getattr(owner, step)
    setattr(owner, name, value)
    assert forward(made) == "theirs"


def test_weights_with_gaps_stay_vllms(forward: Any) -> None:
    made = layer()
    made.mlp.down_proj.weight.data = torch.zeros(WIDTH, 2 * HIDDEN)[:, :HIDDEN]
    assert forward(made) == "theirs"
