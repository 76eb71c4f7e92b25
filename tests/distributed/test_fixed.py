"""Training on fixed data in several layouts against one process with HuggingFace models and plain PyTorch."""

import copy
import functools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hybridflow.models.named_weights import new_score_head
from tests.distributed.cases import NUM_LAYERS, Case
from tests.distributed.fixed_cases import (
    ALGORITHMS,
    LAYOUTS,
    MAX_LENGTH,
    NUM_ROWS,
    SEED,
    SGD,
    examples,
    layout_name,
)
from tests.launch import run_ranks
from tests.reference import fixed as reference
from tests.tiny_models import make_checkpoints

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-5  # relative to the largest value
HIDDEN_SIZE = 64
DEFAULT = LAYOUTS[0]  # of the default set: each algorithm once
every_layout = pytest.mark.parametrize(
    ("case", "budget"),
    [pytest.param(*each, marks=() if each == DEFAULT else pytest.mark.thorough) for each in LAYOUTS],
    ids=lambda x: x.name if isinstance(x, Case) else str(x),
)
every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    make_checkpoints(root, family="llama", tied=False, num_layers=NUM_LAYERS, num_kv_heads=4)
    return root


@pytest.fixture(scope="module")
def results(models, selected, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("results")
    wanted = selected("case", "budget")
    for num_ranks in sorted({case.num_ranks for case, _ in wanted}):
        names = sorted(layout_name(case, budget) for case, budget in wanted if case.num_ranks == num_ranks)
        run_ranks(num_ranks, "tests.distributed.fixed_worker", models, out, *names)
    return out


@functools.cache
def load(results: Path, case: Case, budget: int) -> dict[str, Tensor]:
    return torch.load(results / f"{layout_name(case, budget)}.pt")


def huggingface(models: Path, name: str) -> torch.nn.Module:
    trained = ALGORITHMS[name]
    if trained.section["name"] != "reward_model":
        return AutoModelForCausalLM.from_pretrained(models / trained.model)
    model = AutoModelForSequenceClassification.from_pretrained(models / trained.model, num_labels=1)
    if name == "reward_model":
        with torch.no_grad():
            model.score.weight.copy_(new_score_head(HIDDEN_SIZE, SEED))
    return model


@functools.cache
def computed_by_huggingface(models: Path, name: str) -> dict[str, Tensor]:
    model, section = huggingface(models, name), ALGORITHMS[name].section
    other = AutoModelForCausalLM.from_pretrained(models / "reference")
    rows, found = examples({"sft": "sft", "kto": "labelled"}.get(name, "pairs")), {}
    match section["name"]:
        case "sft":
            loss = reference.sft(model, rows)
        case "dpo":
            smoothing, ipo = section.get("label_smoothing", 0.0), section.get("loss") == "ipo"
            loss, margins = reference.dpo(model, other, rows, section["beta"], smoothing, ipo=ipo)
        case "kto":
            weights = section["desirable_weight"], section["undesirable_weight"]
            loss, point = reference.kto(
                model, other, rows, beta=section["beta"], weights=weights, max_length=MAX_LENGTH
            )
            found["stat/reference_point"] = torch.tensor(point)
        case "reward_model":
            loss, margins = reference.reward_model(model, rows)
    if section["name"] in ("dpo", "reward_model"):
        found["stat/reward_margin_mean"] = torch.tensor(sum(margins) / NUM_ROWS)
        if name != "dpo_step_0":  # whose margins are 0, but for rounding
            found["stat/reward_accuracy"] = torch.tensor(sum(margin > 0 for margin in margins) / NUM_ROWS)
    loss.backward()
    named = dict(copy.deepcopy(model).named_parameters())
    found |= {f"grad/{n}": p.grad.clone() for n, p in model.named_parameters()}
    torch.nn.utils.clip_grad_norm_(model.parameters(), SGD.clip_grad)
    torch.optim.SGD(model.parameters(), lr=SGD.lr).step()
    assert any(not torch.equal(p, named[n]) for n, p in model.named_parameters())
    return found | {"stat/loss": loss.detach()} | {f"sgd/{n}": p.detach() for n, p in model.named_parameters()}


@every_algorithm
@every_layout
def test_a_step_is_that_of_one_process(case, budget, name, results, models):
    found, expected = load(results, case, budget), computed_by_huggingface(models, name)
    for kind in ("stat/", "grad/", "sgd/"):
        names = [key for key in expected if key.startswith(kind)]
        scale = max(1.0 if kind == "stat/" else 0.0, *(float(expected[key].abs().max()) for key in names))
        for key in names:
            difference = float((found[f"{name}/{key}"].double() - expected[key].double()).abs().max()) / scale
            assert difference <= TOLERANCE, f"{key}: {difference:.2e} of the largest value"


@every_algorithm
@every_layout
def test_an_evaluation_is_what_the_step_after_it_found(case, budget, name, results):
    found = load(results, case, budget)
    told = {key: x for key, x in found.items() if key.startswith(f"{name}/stat/eval/")}
    assert told
    for key, value in told.items():
        assert float(value) == pytest.approx(float(found[key.replace("eval/", "")]), rel=1e-6), key


@every_layout
def test_where_policy_and_reference_are_the_same_dpo_is_log_2(case, budget, results):
    """Exactly; but for the rounding of products of slices that lie otherwise in memory."""
    found = load(results, case, budget)
    rounding = 1e-6 if case.tp > 1 else 0.0
    assert float(found["dpo_step_0/stat/loss"]) == pytest.approx(math.log(2), rel=1e-7 + rounding)
    assert float(found["dpo_step_0/stat/reward_margin_mean"]) == pytest.approx(0.0, abs=rounding)
    assert float(found["dpo/stat/loss"]) != pytest.approx(math.log(2), rel=1e-2)


@every_layout
def test_a_new_score_head_is_the_same_in_every_layout(case, budget, results):
    found = load(results, case, budget)
    assert torch.equal(found["reward_model/score_before"], new_score_head(HIDDEN_SIZE, SEED))
    assert float(found["reward_model/score_before"].std()) == pytest.approx(HIDDEN_SIZE**-0.5, rel=0.3)


@pytest.mark.thorough
@pytest.mark.parametrize(("case", "budget"), [(Case(dp=2), 20)])
def test_pairs_are_cut_over_replicas_and_micro_batches(case, budget, results):
    """Else their independence of it was not tested."""
    own = set(load(results, case, budget)["rows_of_first_replica"].tolist())
    assert any((2 * pair in own) != (2 * pair + 1 in own) for pair in range(NUM_ROWS))
