"""Every algorithm's flow in several layouts against one process of HuggingFace and plain PyTorch.

Log-probs, advantages, the loss, its gradient and one clipped step; in the first step every ratio is exactly 1.
"""

import copy
import functools
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.distributed.algorithm_cases import (
    ALGORITHMS,
    DEFAULT,
    LAYOUTS,
    ROW_TEMPERATURES,
    RUN,
    SGD,
    WHOLE,
    make_rollout,
    make_uneven_rollout,
)
from tests.distributed.cases import NUM_LAYERS, Case
from tests.launch import run_ranks
from tests.reference.algorithms import Response, actor_loss, estimate
from tests.tiny_models import by_checkpoint_name, make_checkpoints

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-5  # relative to the largest value


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    make_checkpoints(root, family="llama", tied=False, num_layers=NUM_LAYERS, num_kv_heads=4)
    return root


@pytest.fixture(scope="module")
def results(models, selected, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("results")
    wanted = selected("case")
    for num_ranks in sorted({case.num_ranks for case in wanted}):
        names = sorted(case.name for case in wanted if case.num_ranks == num_ranks)
        run_ranks(num_ranks, "tests.distributed.algorithms_worker", models, out, *names)
    return out


@functools.cache
def load(results: Path, case: Case) -> dict[str, Tensor]:
    return torch.load(results / f"{case.name}.pt")


@functools.cache
def huggingface(models: Path) -> dict[str, torch.nn.Module]:
    found = {name: AutoModelForCausalLM.from_pretrained(models / name) for name in ("policy", "reference")}
    return found | {"critic": AutoModelForSequenceClassification.from_pretrained(models / "critic")}


@functools.cache
def estimated(models: Path, by_length: bool = False) -> tuple[Response, ...]:
    rollout = make_uneven_rollout() if by_length else make_rollout()
    lengths = rollout.lengths.tolist()
    pieces = [x.split(lengths) for x in (rollout.input_ids, rollout.response_mask, rollout.rollout_log_probs)]
    whole = [x.tolist() for x in (rollout.prompt_lengths, rollout.prompt_indices, rollout.truncated)]
    rows = zip(*pieces, *whole, strict=True)
    responses = [Response(tokens, mask, p, group, engine[mask], cut) for tokens, mask, engine, p, group, cut in rows]
    for r, temperature in zip(responses, ROW_TEMPERATURES, strict=True):
        r.temperature = temperature if by_length else 1.0
    estimate(responses, huggingface(models))
    return tuple(responses)


@functools.cache
def computed_by_huggingface(models: Path, name: str) -> dict[str, Tensor]:
    compared = ALGORITHMS[name]
    responses = [copy.copy(r) for r in estimated(models, compared.by_length)]
    compared.advantages(responses)
    policy = copy.deepcopy(huggingface(models)["policy"])
    loss, largest = actor_loss(responses, policy, compared.recipe)
    loss.backward()
    found = {"loss": loss.detach(), "largest": torch.tensor(largest), "advantages": packed(responses, "advantages")}
    if not compared.engine:
        found["log_probs"] = packed(responses, "log_probs")
    if name == "vapo":
        found["returns"] = packed(responses, "returns")
    named = dict(policy.named_parameters())
    found |= {f"actor_grad/{n}": x for n, x in by_name({n: p.grad.clone() for n, p in named.items()}).items()}
    torch.nn.utils.clip_grad_norm_(policy.parameters(), SGD.clip_grad)
    torch.optim.SGD(policy.parameters(), lr=SGD.lr).step()
    return found | {f"actor_sgd/{n}": x for n, x in by_name({n: p.detach() for n, p in named.items()}).items()}


def by_name(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return by_checkpoint_name(tensors, "llama")


def packed(responses: list[Response], name: str) -> Tensor:
    """Zero in prompts and gaps."""
    every = []
    for r in responses:
        row = torch.zeros(len(r.tokens))
        row[r.written] = getattr(r, name).float()
        every.append(row)
    return torch.cat(every)


def marks(case: Case) -> Collection[pytest.MarkDecorator]:
    return () if case == DEFAULT else (pytest.mark.thorough,)


every_one = pytest.mark.parametrize(
    ("case", "name"),
    [pytest.param(case, name, marks=marks(case)) for case in LAYOUTS for name in RUN[case]],
    ids=lambda x: getattr(x, "name", x),
)
whole_ones = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=marks(case)) for case in WHOLE], ids=lambda case: case.name
)


@every_one
def test_an_iteration_is_that_of_one_process(case, name, results, models):
    found, expected = load(results, case), computed_by_huggingface(models, name)
    assert abs(found[f"{name}/stat/actor/loss"] - expected["loss"]) <= TOLERANCE * expected["largest"]
    for kind in ("advantages", "log_probs", "returns", "actor_grad/", "actor_sgd/"):
        names = [key for key in expected if key.startswith(kind)]
        scale = max((expected[key].abs().max() for key in names), default=torch.tensor(1.0))
        assert scale > 0, f"{kind}: nothing to compare with"
        for key in names:
            difference = (found[f"{name}/{key}"].double() - expected[key].double()).abs().max() / scale
            assert difference <= TOLERANCE, f"{key}: {difference:.2e} of the largest value"


@every_one
def test_in_the_first_step_every_ratio_is_one(case, name, results):
    """Unless the engine's log-probs are the old ones."""
    stats = {
        key.partition("stat/actor/")[2]: float(x) for key, x in load(results, case).items() if f"{name}/stat" in key
    }
    if ALGORITHMS[name].engine:
        assert stats["approx_kl"] > 1e-3
    else:
        assert abs(stats["approx_kl"]) < 1e-12
        assert all(stats[key] == 0 for key in stats if key.startswith("clip_fraction"))


@whole_ones
def test_shares_of_what_was_clipped_or_out_of_bounds_are_those_of_one_process(case, results, models):
    """By sign and side; a loss that clips nothing has no such metric."""
    found, responses = load(results, case), estimated(models)
    each = torch.cat([(r.log_probs - r.rollout_log_probs).exp() for r in responses])
    assert found["cispo/stat/actor/clip_fraction_low"] == pytest.approx(float((each < 0.7).float().mean()), abs=1e-6)
    assert found["cispo/stat/actor/clip_fraction_high"] == pytest.approx(float((each > 1.2).float().mean()), abs=1e-6)
    both = found["gspo/stat/actor/clip_fraction_low"] + found["gspo/stat/actor/clip_fraction_high"]
    assert found["gspo/stat/actor/clip_fraction"] == pytest.approx(float(both), abs=1e-6) and both > 0
    outside = float(((each < 0.8) | (each > 1.4)).float().mean())
    assert found["weights_icepop/stat/actor/weights_out_of_bounds"] == pytest.approx(outside, abs=1e-6) and outside > 0
    for kind in ("token", "sequence", "geometric"):  # some are, and some are not
        assert 0 < found[f"weights_{kind}/stat/actor/weights_out_of_bounds"] < 1
    for name in ("sapo", "rloo", "opo", "maxrl", "remax"):
        assert not any(key.startswith(f"{name}/stat/actor/clip") for key in found)


@whole_ones
def test_metrics_by_bucket_of_prompt_lengths(case, results, models):
    """Rows 2 and 6 are of at most 2 prompt tokens, rows 1 and 3 of more than 4, one of each group."""
    found, scores = load(results, case), torch.tensor([r.score for r in estimated(models, True)])
    area = "by_length/stat/sampling/"
    stats = {key.removeprefix(area): float(x) for key, x in found.items() if key.startswith(area)}
    assert [stats[f"{name}/prompts"] for name in ("up_to_2", "up_to_4", "longer")] == [2, 2, 2]
    assert stats["up_to_2/score_mean"] == pytest.approx(float(scores[[2, 6]].mean()), rel=1e-6)
    assert stats["longer/score_mean"] == pytest.approx(float(scores[[1, 3]].mean()), rel=1e-6)
    assert stats["up_to_4/truncated_fraction"] == 0.25 and stats["longer/truncated_fraction"] == 0
    assert not any(key.startswith("rloo/stat/sampling") for key in found)


@whole_ones
def test_a_prompt_that_samples_share_changes_nothing(case, results):
    """Against each row with a prompt of its own: log-probs, values, and the gradients of actor and critic."""
    found = {key: x for key, x in load(results, case).items() if key.startswith(("shared/", "not/"))}
    names = [key.removeprefix("not/") for key in found if key.startswith("not/")]
    for kind in ("log_probs", "values", "actor_grad/", "critic_grad/"):
        own = [name for name in names if name.startswith(kind)]
        scale = max(found[f"not/{name}"].abs().max() for name in own)
        assert scale > 0
        for name in own:
            difference = (found[f"shared/{name}"] - found[f"not/{name}"]).abs().max() / scale
            assert difference <= TOLERANCE, f"{name}: {difference:.2e} of the largest value"
    assert any(not torch.equal(found[f"shared/{name}"], found[f"not/{name}"]) for name in names)  # summed otherwise
