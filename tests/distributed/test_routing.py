"""An actor that takes given experts, against HuggingFace with the same ones: log-probs, a loss, every gradient."""

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.distributed.cases import HYPER, NUM_LAYERS, Case
from tests.distributed.routing_cases import BUDGETS, CASES, CHOSEN, FAMILIES, NUM_EXPERTS, make_routed_groups
from tests.launch import run_ranks
from tests.tiny_models import by_checkpoint_name, make_checkpoints

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-5  # relative to the largest value
DEFAULT = {("tp2pp1dp1vpp1sp-full", "qwen3_moe"), ("tp1pp2dp1vpp2-full", "mixtral"), ("tp1pp1dp1vpp1-moe", "mixtral")}
every_case = pytest.mark.parametrize(
    ("case", "family"),
    [
        pytest.param(case, family, marks=() if (case.name, family) in DEFAULT else pytest.mark.thorough)
        for case in CASES
        for family in FAMILIES
    ],
    ids=lambda x: x if isinstance(x, str) else x.name,
)


@pytest.fixture(scope="module")
def checkpoints(selected, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for name in sorted(selected("family")):
        family, tied, num_kv_heads = FAMILIES[name]
        make_checkpoints(root / name, family=family, tied=tied, num_layers=NUM_LAYERS, num_kv_heads=num_kv_heads)
    return root


@pytest.fixture(scope="module")
def results(checkpoints, selected, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("results")
    wanted = selected("case", "family")
    for num_ranks in sorted({case.num_ranks for case, _ in wanted}):
        names = sorted(f"{case.name}/{family}" for case, family in wanted if case.num_ranks == num_ranks)
        run_ranks(num_ranks, "tests.distributed.routing_worker", checkpoints, out, *names)
    return out


class ForcedRouters:
    """In the place of a HuggingFace model's routers. `experts` (tokens, layers, k) are those of the next sequence."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.experts, self.own, self.chosen = torch.zeros(0), dict[int, Tensor](), dict[int, Tensor]()
        for number, layer in enumerate(model.model.layers):
            layer.mlp.gate.forward = functools.partial(self._route, layer.mlp.gate, number)

    def _route(self, gate: torch.nn.Module, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.nn.functional.linear(hidden.flatten(0, -2), gate.weight)
        every = logits.softmax(-1, dtype=torch.float32)
        self.own[layer] = own = every.topk(CHOSEN).indices
        recorded = (self.experts[:, layer, :1] != self.experts[:, layer, 1:]).expand(-1, CHOSEN)
        self.chosen[layer] = chosen = torch.where(recorded, self.experts[:, layer].long(), own)
        shares = every.gather(1, chosen)
        return logits, shares / shares.sum(-1, keepdim=True), chosen


def count(counts: Tensor, chosen: Tensor) -> None:
    """Of a row (t, k): all but the last token."""
    for expert in chosen[:-1].flatten().tolist():
        counts[expert] += 1


def max_over_mean(counts: Tensor) -> Tensor:
    """(layers, experts) -> (layers + 2,): of each layer, their mean and the largest."""
    of_layers = counts.max(1).values / counts.double().mean(1)
    return torch.cat([of_layers, of_layers.mean()[None], of_layers.max()[None]])


@functools.cache
def by_huggingface(family: Path) -> dict[str, Tensor]:
    policy, (batch, experts) = AutoModelForCausalLM.from_pretrained(family / "policy"), make_routed_groups()
    reference = AutoModelForCausalLM.from_pretrained(family / "reference")
    routers, differ = ForcedRouters(policy), list[Tensor]()
    found = {name: torch.zeros(len(batch.input_ids)) for name in ("log_probs", "ref_log_probs")}
    losses, start = list[Tensor](), 0
    loads = {name: torch.zeros(NUM_LAYERS, NUM_EXPERTS, dtype=torch.int64) for name in ("load", "own_load")}
    pieces = zip(*(x.split(batch.lengths.tolist()) for x in (batch.input_ids, batch.response_mask)), strict=True)
    for row, (ids, written) in enumerate(pieces):
        routers.experts, places = experts.split(batch.lengths.tolist())[row], written.nonzero().squeeze(1)
        for name, model in (("log_probs", policy), ("ref_log_probs", reference)):
            log_p = (model(ids[None]).logits[0] / HYPER.temperature).log_softmax(-1)
            log_probs = log_p[places - 1, ids[places]]
            found[name][start + places] = log_probs.detach()
            if model is policy:
                losses.append(-log_probs)
                for layer in range(NUM_LAYERS):
                    count(loads["load"][layer], routers.chosen[layer])
        for layer in range(NUM_LAYERS):
            theirs, before = routers.experts[:, layer].long(), places - 1
            recorded = theirs[before, 0] != theirs[before, 1]
            unlike = (theirs[before].sort().values != routers.own[layer][before].sort().values).any(1)
            differ.append(unlike[recorded])
        routers.experts = torch.zeros_like(routers.experts)
        policy(ids[None])
        for layer in range(NUM_LAYERS):
            count(loads["own_load"][layer], routers.chosen[layer])
        start += len(ids)
    loss = torch.cat(losses).mean()
    loss.backward()
    gradients = by_checkpoint_name({n: p.grad for n, p in policy.named_parameters()}, policy.config.model_type)
    found |= {"loss": loss.detach(), "differ": torch.cat(differ).float().mean()}
    found |= {name: max_over_mean(load) for name, load in loads.items()}
    return found | {f"grad/{name}": x for name, x in gradients.items()}


@every_case
def test_the_given_experts_compute(case: Case, family: str, results: Path, checkpoints: Path) -> None:
    found, expected = torch.load(results / f"{case.name}-{family}.pt"), by_huggingface(checkpoints / family)
    largest = max(x.abs().max() for name, x in expected.items() if name.startswith("grad/"))
    assert 0.5 < expected["differ"] < 1, "most of the given experts are not those of the routers"
    for budget in BUDGETS:
        produced = {name.removeprefix(f"{budget}/") for name in found if name.startswith(f"{budget}/")}
        assert produced == {*expected, "differ_at_step", "load_at_step"}
        assert found[f"{budget}/load_at_step"].tolist() == found[f"{budget}/load"].tolist(), "also if computed again"
        for name in ("load", "own_load"):
            assert found[f"{budget}/{name}"].tolist() == pytest.approx(expected[name].tolist(), rel=1e-12), name
        assert found[f"{budget}/differ_at_step"] == pytest.approx(float(expected["differ"]))
        for name, value in expected.items():
            scale = largest if name.startswith("grad/") else value.abs().max()
            difference = (found[f"{budget}/{name}"] - value).abs().max() / scale
            assert difference <= TOLERANCE, f"{name}, {budget} tokens a micro-batch: {difference:.2e}"
