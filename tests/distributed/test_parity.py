"""Every layout against one process of HuggingFace and plain PyTorch: log-probs, values, scores, gradients, updates."""

import functools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hybridflow.models.prompt_groups import PromptGroup, prompt_groups
from tests.covering import params
from tests.distributed.cases import (
    ADAM,
    DEFAULT,
    HYPER,
    REST,
    SGD,
    WEEKLY,
    Case,
    budgets,
    listed,
    make_family,
    make_groups,
    make_rollout,
)
from tests.launch import run_ranks
from tests.reference import grpo
from tests.reference.ppo import Episode, actor_loss, critic_loss, estimate
from tests.tiny_models import SCORES, by_checkpoint_name

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-5  # relative to the largest value
# A delta net's norm stands behind sums that nearly cancel: transformers' two algorithms for it, by chunks and token by
# token, are as far as this from each other in float32, and from the same in float64.
TOLERANCES = {"qwen3_5": 1e-4, "qwen3_5_moe": 1e-4}
SIGMOID_ROUTERS = ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "moonlight")


@pytest.fixture(scope="module")
def checkpoints(selected, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for name in sorted(selected("family")):
        make_family(root, name)
    return root


@pytest.fixture(scope="module")
def results(checkpoints, selected, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("results")
    wanted = selected("case", "family")
    for num_ranks in sorted({case.num_ranks for case, _ in wanted}):
        names = sorted(f"{case.name}/{family}" for case, family in wanted if case.num_ranks == num_ranks)
        run_ranks(num_ranks, "tests.distributed.parity_worker", checkpoints, out, *names)
    return out


def named(value: Case | str) -> str:
    return value if isinstance(value, str) else value.name


every_case = pytest.mark.parametrize(("case", "family"), params(listed(DEFAULT), listed(REST), WEEKLY), ids=named)


@pytest.fixture
def expected(family, checkpoints) -> dict[str, torch.Tensor]:
    return computed_by_huggingface(checkpoints / family)


@functools.cache  # the tests do not come family by family
def computed_by_huggingface(family: Path) -> dict[str, torch.Tensor]:
    models = {name: AutoModelForCausalLM.from_pretrained(family / name) for name in ("policy", "reference")}
    for name in ("reward", "critic"):
        models[name] = AutoModelForSequenceClassification.from_pretrained(family / name)
    rollout = make_rollout()
    pieces = rollout.input_ids.split(rollout.lengths.tolist())
    episodes = [Episode(x, p) for x, p in zip(pieces, rollout.prompt_lengths.tolist(), strict=True)]
    estimate(episodes, models, HYPER)
    found = {name: packed(episodes, name) for name in ("log_probs", "ref_log_probs", "values", "rewards")}
    found |= {name: packed(episodes, name) for name in ("advantages", "returns")}
    found["scores"] = torch.tensor([e.score for e in episodes])
    found["actor_loss"] = actor_loss(episodes, models["policy"], HYPER).detach()
    found |= {f"actor_grad/{n}": x for n, x in gradients(models["policy"], episodes, actor_loss).items()}
    found |= {f"critic_grad/{n}": x for n, x in gradients(models["critic"], episodes, critic_loss).items()}
    found["actor_grad_norm"] = torch.stack([x.norm() for n, x in found.items() if n.startswith("actor_grad/")]).norm()
    found |= {f"actor_sgd/{n}": x for n, x in after_sgd(models["policy"], episodes, actor_loss).items()}
    found |= {f"critic_sgd/{n}": x for n, x in after_sgd(models["critic"], episodes, critic_loss).items()}
    policy = AutoModelForCausalLM.from_pretrained(family / "policy")
    found |= {f"actor_adam/{n}": x for n, x in after_adam(policy, episodes).items()}
    return found


def packed(episodes: list[Episode], name: str) -> torch.Tensor:
    """Zero in the prompts."""
    return torch.cat([torch.cat([torch.zeros(e.prompt_length), getattr(e, name)]) for e in episodes])


def by_name(tensors, model) -> dict[str, torch.Tensor]:
    return by_checkpoint_name(tensors, model.config.model_type)


def gradients(model, episodes, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss(episodes, model, HYPER).backward()
    return by_name({name: p.grad.clone() for name, p in model.named_parameters()}, model)


def after_sgd(model, episodes, loss) -> dict[str, torch.Tensor]:
    gradients(model, episodes, loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), SGD.clip_grad)
    torch.optim.SGD(model.parameters(), lr=SGD.lr).step()
    return by_name({name: p.detach().clone() for name, p in model.named_parameters()}, model)


def after_adam(model, episodes) -> dict[str, torch.Tensor]:
    """Two steps; as megatron has it, weights of one dimension do not decay."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": ADAM.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=ADAM.lr, eps=ADAM.eps, betas=ADAM.betas)
    for _ in range(2):
        gradients(model, episodes, actor_loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM.clip_grad)
        optimizer.step()
    return by_name({name: p.detach().clone() for name, p in model.named_parameters()}, model)


def tolerance_of(family: str) -> float:
    return TOLERANCES.get(family, TOLERANCE)


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    difference = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert found.shape == expected.shape and difference <= tolerance, f"{what}: {difference:.2e} of the largest value"


@functools.cache
def load(results: Path, case: Case, family: str) -> dict[str, torch.Tensor]:
    found = torch.load(results / f"{case.name}-{family}.pt")
    assert not isinstance(found, str), found
    return found


@every_case
@pytest.mark.parametrize("name", ["log_probs", "ref_log_probs", "values", "scores", "rewards", "advantages", "returns"])
def test_estimates(case, name, family, results, expected):
    found = load(results, case, family)
    for budget in budgets(case, family):
        what = f"{name}, {budget} tokens a micro-batch"
        assert_close(found[f"{budget}/{name}"], expected[name], what, tolerance_of(family))


@every_case
@pytest.mark.parametrize("kind", ["actor_grad", "critic_grad", "actor_sgd", "critic_sgd"])
def test_gradients_and_update_do_not_depend_on_the_split(case, kind, family, results, expected):
    found = load(results, case, family)
    names = [name for name in expected if name.startswith(f"{kind}/")]
    largest = max(expected[name].abs().max() for name in names)
    assert names
    for budget in budgets(case, family):
        produced = {name for name in found if name.startswith(f"{budget}/{kind}/")}
        frozen = {name for name in produced if name.endswith("e_score_correction_bias")}  # transformers has a buffer
        assert bool(frozen) == (family in SIGMOID_ROUTERS and (kind.startswith("actor") or family not in SCORES))
        assert not any(found[name].any() for name in frozen if "_grad/" in name)
        assert produced - frozen == {f"{budget}/{name}" for name in names}
        for name in names:
            difference = (found[f"{budget}/{name}"] - expected[name]).abs().max() / largest
            assert difference <= tolerance_of(family), f"{name}, {budget} tokens a micro-batch: {difference:.2e}"


@every_case
def test_zero1_adam_steps(case, family, results, expected):
    found = load(results, case, family)
    for name in [name for name in expected if name.startswith("actor_adam/")]:
        assert_close(found[name], expected[name], name, tolerance_of(family))


@every_case
def test_gradients_summed_during_the_backward_pass_are_the_same(case, family, results):
    """The sum of two is, to the bit. megatron looks on during the first backward pass of a model; then it overlaps."""
    found = load(results, case, family)
    names = [name for name in found if name.startswith("actor_adam/")]
    assert names
    for name in names if case.dp > 1 else []:
        assert_close(found[f"overlapped/{name}"], found[name], name, 0 if case.dp * case.cp == 2 else 1e-6)
    if case.dp > 1:
        assert found["overlapped/under_way"].tolist() == [False, True], "the actor's first step, and its second"
        gathering = [True, True, False, True]  # after each, when weights are read; each was waited for
        assert found["overlapped/gathering"].tolist() == gathering


@every_case
def test_first_step_has_ratio_one(case, family, results, expected):
    found = load(results, case, family)
    for budget in budgets(case, family):
        assert found[f"{budget}/stat/actor/clip_fraction"] == 0
        assert abs(found[f"{budget}/stat/actor/approx_kl"]) < 1e-12
        assert_close(found[f"{budget}/stat/actor/loss"], expected["actor_loss"], "loss", tolerance_of(family))
        norm = found[f"{budget}/stat/actor/grad_norm"]
        assert_close(norm, expected["actor_grad_norm"], "gradient norm", tolerance_of(family))
    assert expected["actor_grad_norm"] > SGD.clip_grad, "a norm after clipping would be another"


# ------------------------------------------------------------------------------------------------ GRPO


def test_the_samples_of_a_prompt_share_it():
    assert prompt_groups(make_groups(), range(8)) == [PromptGroup((0, 1, 2, 3), 4), PromptGroup((4, 5, 6, 7), 3)]


@functools.cache
def groups_by_huggingface(family: Path) -> dict[str, torch.Tensor]:
    models = {name: AutoModelForCausalLM.from_pretrained(family / name) for name in ("policy", "reference")}
    models["reward"] = AutoModelForSequenceClassification.from_pretrained(family / "reward")
    rollout = make_groups()
    lengths = rollout.lengths.tolist()
    pieces = zip(rollout.input_ids.split(lengths), rollout.response_mask.split(lengths), strict=True)
    responses = [grpo.Response(x, m, g) for (x, m), g in zip(pieces, rollout.prompt_indices.tolist(), strict=True)]
    grpo.estimate(responses, models, HYPER)
    found = {"raw_scores": torch.tensor([r.score for r in responses])}
    for name in ("log_probs", "ref_log_probs"):
        found[name] = torch.zeros(len(rollout.input_ids))
        found[name][rollout.response_mask] = torch.cat([getattr(r, name) for r in responses])
    found["advantages"] = torch.zeros(len(rollout.input_ids))
    found["advantages"][rollout.response_mask] = torch.cat(
        [r.advantage.float().expand(int(r.written.sum())) for r in responses]
    )
    found["stat/actor/loss"] = grpo.actor_loss(responses, models["policy"], HYPER).detach()
    found |= {f"actor_grad/{n}": x for n, x in gradients(models["policy"], responses, grpo.actor_loss).items()}
    found |= {f"actor_sgd/{n}": x for n, x in after_sgd(models["policy"], responses, grpo.actor_loss).items()}
    return found


@every_case
def test_grpo_with_gaps_in_the_responses(case, family, results, checkpoints):
    """Log-probs, scores, advantages, the loss, its gradient and one clipped SGD step of the flow as it is."""
    found, expected = load(results, case, family), groups_by_huggingface(checkpoints / family)
    largest = max(x.abs().max() for name, x in expected.items() if name.startswith("actor_grad/"))
    for name, value in expected.items():
        scale = largest if name.startswith("actor_grad/") else value.abs().max()
        difference = (found[f"grpo/{name}"] - value).abs().max() / scale
        assert difference <= tolerance_of(family), f"{name}: {difference:.2e} of the largest value"
