"""The mixture of experts against a loop over tokens, and its router by hand."""

from functools import partial

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from hybridflow.architecture.layer_kinds import EXPERTS
from hybridflow.models.expert_dispatch import Arrived
from hybridflow.models.expert_rows import KernelsByTorch
from hybridflow.models.experts import Experts, MixtureOfExperts, Router, SigmoidRouter
from hybridflow.models.layers import SwiGLUFunction
from hybridflow.parallel.layout import Cut, Place
from hybridflow.placement.footprint import layer_bytes
from tests.automap.round_profile import small_spec
from tests.placement.kept import KeptBytes

pytestmark = pytest.mark.compiles


KERNELS = KernelsByTorch(SwiGLUFunction)


def seen(tokens: Tensor, shares: Tensor, chosen: Tensor, place: Place | None = None) -> Arrived:
    """By a rank that sees all tokens and holds some of four experts."""
    first = 0 if place is None else place.ep_rank * 4 // place.ep
    return Arrived(tokens, shares, chosen - first, chosen.numel() if place is None or place.ep == 1 else None)


def config(**changes: object) -> TransformerConfig:
    sizes = dict(num_layers=1, hidden_size=8, num_attention_heads=1, ffn_hidden_size=12, moe_ffn_hidden_size=12)
    experts = dict(num_moe_experts=4, moe_router_topk=2, moe_router_pre_softmax=True)
    return TransformerConfig(**{**sizes, **experts, **changes}, gated_linear_unit=True, add_bias_linear=False)


def one_by_one(experts: Experts, tokens: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    rows = []
    for token, its_shares, its_experts in zip(tokens, shares, chosen, strict=True):
        row = 0
        for share, expert in zip(its_shares, its_experts.tolist(), strict=True):
            gate, up = (experts.linear_fc1.weight[expert] @ token).chunk(2)
            row = row + share * (experts.linear_fc2.weight[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


def test_a_layer_may_tell_more_than_the_config() -> None:
    """As a layer of megatron-core 0.19.2 does. 0.16.1 gives the config alone."""
    made_of = {"swiglu": SwiGLUFunction, "kernels": KERNELS}
    plain = MixtureOfExperts(config(), **made_of, place=Place(1, 0))
    others = {"pg_collection": object(), "is_mtp_layer": False, "name": "mlp"}
    told = MixtureOfExperts(config(), **made_of, place=Place(1, 0), **others)
    shapes = [{name: x.shape for name, x in layer.named_parameters()} for layer in (plain, told)]
    assert shapes[0] == shapes[1] and told.group is None


@pytest.mark.parametrize("chosen", ["spread", "one expert for all", "all but one"])
def test_experts_equal_a_loop_over_tokens(chosen: str) -> None:
    torch.manual_seed(0)
    experts = Experts(config(), KERNELS, Place(1, 0))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    tokens = torch.randn(5, 8, requires_grad=True)
    shares = torch.rand(5, 2, requires_grad=True)
    numbers = {
        "spread": torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2], [0, 3]]),
        "one expert for all": torch.tensor([[2, 0]] * 5),
        "all but one": torch.tensor([[0, 3], [3, 1], [0, 1], [1, 3], [3, 0]]),
    }[chosen]
    inputs = [tokens, shares, *experts.parameters()]
    expected = one_by_one(experts, tokens, shares, numbers)
    actual = experts(seen(tokens, shares, numbers))
    torch.testing.assert_close(actual, expected)
    weights = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad((actual * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)  # sums of products up to 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_plan_counts_what_experts_keep_for_the_backward_pass(dtype: torch.dtype) -> None:
    """And no float32 copy of the experts' outputs is among it. t tokens, k experts each, ffn size f, hidden size h.

    The plan is of GPUs. On CPUs the product of gate and up is kept, too, beside that with the share.
    """
    t, k, f, h = 512, 2, 16, 64
    experts = Experts(config(params_dtype=dtype, hidden_size=h, moe_ffn_hidden_size=f), KERNELS, Place(1, 0))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    tokens, shares = torch.randn(t, h, dtype=dtype, requires_grad=True), torch.rand(t, k, requires_grad=True)
    with KeptBytes([*experts.parameters(), tokens]) as kept:
        outputs = experts(seen(tokens, shares, torch.randint(0, 4, (t, k))))
    assert outputs.dtype == dtype
    per_token = partial(
        layer_bytes, kind=EXPERTS, cut=Cut(), sequence_parallel=False, recompute="none", itemsize=dtype.itemsize
    )
    of_experts = per_token(
        small_spec(family="mixtral", num_experts=4, experts_per_token=k, ffn_hidden_size=f, hidden_size=h)
    )
    without = per_token(
        small_spec(family="mixtral", num_experts=4, experts_per_token=0, ffn_hidden_size=f, hidden_size=h)
    )
    numbers = t * k * (4 + 3 * 8) + 16  # shares, the order, what leads there and back; ends of experts
    planned = t * (of_experts - without + k * f * dtype.itemsize)
    assert planned <= kept.peak <= planned + numbers


def test_experts_read_no_number_back_from_the_device() -> None:
    """On meta tensors there is none to read; on a GPU each reading waits for all that was launched."""
    with torch.device("meta"):
        experts = Experts(
            config(params_dtype=torch.bfloat16, hidden_size=64, moe_ffn_hidden_size=64), KERNELS, Place(1, 0)
        )
        tokens, shares = torch.empty(5, 64, dtype=torch.bfloat16), torch.empty(5, 2)
        assert experts(seen(tokens, shares, torch.empty(5, 2, dtype=torch.int64))).shape == (5, 64)


@pytest.mark.parametrize("cut", [Cut(2, 1, 2), Cut(4, 1, 4), Cut(4, 2, 2)], ids=str)
def test_the_parts_of_a_mixture_add_up_to_it(cut: Cut) -> None:
    """Outputs, and gradients of tokens and shares; those of weights are each rank's own. One rank gets no token."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, moe_ffn_hidden_size=16, params_dtype=torch.float32)
    whole = Experts(config(**sizes), KERNELS, Place(1, 0))
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter)
    tokens = torch.randn(7, 16, requires_grad=True)
    shares, chosen = torch.rand(7, 2, requires_grad=True), torch.randint(0, 3, (7, 2))
    own = [tokens, shares, *whole.parameters()]
    expected = whole(seen(tokens, shares, chosen))
    weights = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * weights).sum(), own)
    sums = [torch.zeros_like(x) for x in (expected, tokens, shares)]
    for place in cut.places("experts"):
        part = Experts(config(**sizes), KERNELS, place)
        rows = slice(place.ep_rank * 4 // place.ep, (place.ep_rank + 1) * 4 // place.ep)
        columns = slice(place.tp_rank * 16 // place.tp, (place.tp_rank + 1) * 16 // place.tp)

        def cut_as_it_is(fc1: Tensor, fc2: Tensor, rows: slice = rows, columns: slice = columns) -> list[Tensor]:
            halves = fc1[rows].chunk(2, dim=1)
            return [torch.cat([half[:, columns] for half in halves], dim=1), fc2[rows][:, :, columns]]

        with torch.no_grad():
            for parameter, held in zip(part.parameters(), cut_as_it_is(*whole.parameters()), strict=True):
                parameter.copy_(held)
        output = part(seen(tokens, shares, chosen, place))
        found = torch.autograd.grad((output * weights).sum(), [tokens, shares, *part.parameters()])
        sums = [a + b for a, b in zip(sums, (output, *found[:2]), strict=True)]
        for a, b in zip(found[2:], cut_as_it_is(*gradients[2:]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)  # sums of products up to 100
    for a, b in zip(sums, (expected, *gradients[:2]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)  # sums of products up to 100


def test_the_router_by_hand() -> None:
    # logits are ln 1, ln 2, ln 3, ln 4: probabilities 0.1, 0.2, 0.3, 0.4
    router = Router(config(hidden_size=1))
    with torch.no_grad():
        router.weight[:, 0] = torch.tensor([1.0, 2, 3, 4]).log()
    shares, experts = router(torch.ones(1, 1))
    assert experts.tolist() == [[3, 2]]
    torch.testing.assert_close(shares, torch.tensor([[4 / 7, 3 / 7]]))
    router.normalize = False
    torch.testing.assert_close(router(torch.ones(1, 1))[0], torch.tensor([[0.4, 0.3]]))


@pytest.mark.parametrize("router_class", [Router, SigmoidRouter])
def test_given_experts_take_the_routers_own_scores(router_class: type[Router]) -> None:
    """Those of the tokens that have any. The choice has no gradient; the shares have theirs."""
    torch.manual_seed(0)
    router, tokens = router_class(config()), torch.randn(3, 8)
    torch.nn.init.normal_(router.weight)
    _, own = router(tokens)
    least = router(tokens @ -torch.eye(8))[1]  # of the opposite logits
    given = least.clone()
    given[1] = 0  # no record
    shares, chosen = router(tokens, given.to(torch.uint8))
    assert chosen.tolist() == [least[0].tolist(), own[1].tolist(), least[2].tolist()]
    assert own[0].tolist() != least[0].tolist()
    logits = torch.nn.functional.linear(tokens, router.weight)
    scores = (logits.softmax(-1) if router_class is Router else logits.sigmoid()).gather(1, chosen)
    torch.testing.assert_close(shares, scores / scores.sum(-1, keepdim=True))
    found = torch.autograd.grad(shares[:, 0].sum(), router.weight, retain_graph=True)
    expected = torch.autograd.grad((scores[:, 0] / scores.sum(-1)).sum(), router.weight)
    torch.testing.assert_close(found, expected)
