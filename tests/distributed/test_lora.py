"""Adapters in layouts against PEFT on transformers: log-probs, losses, gradients, steps; what must be wrong."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hybridflow.architecture.lora import initial_a
from tests.covering import params
from tests.distributed.cases import (
    ADAM,
    HYPER,
    SGD,
    Case,
    listed,
    make_family,
    make_groups,
    make_rollout,
)
from tests.distributed.lora_cases import (
    DEFAULT,
    RANK,
    REST,
    SOME,
    WEEKLY,
    WITHOUT_CRITIC,
    adapted,
    plain_names,
    targets,
    trained,
)
from tests.distributed.test_parity import TOLERANCES, assert_close, named, packed, tolerance_of
from tests.launch import run_ranks
from tests.reference import grpo
from tests.reference.ppo import Episode, actor_loss, critic_loss, estimate

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def checkpoints(selected, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for name in sorted(selected("family")):
        made = make_family(root, name)
        adapted(made / "policy", name, seed=1).save_pretrained(made / "adapter")
        if name not in WITHOUT_CRITIC:
            adapted(made / "policy", name, seed=2, score=True).save_pretrained(made / "critic_adapter")
    return root


@pytest.fixture(scope="module")
def results(checkpoints, selected, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("results")
    wanted = selected("case", "family")
    for num_ranks in sorted({case.num_ranks for case, _ in wanted}):
        names = sorted(f"{case.name}/{family}" for case, family in wanted if case.num_ranks == num_ranks)
        run_ranks(num_ranks, "tests.distributed.lora_worker", checkpoints, out, *names)
    return out


def each_case(wanted: Callable[[str], bool] = lambda family: True) -> pytest.MarkDecorator:
    kept = ([each for each in cases if wanted(each[1])] for cases in (listed(DEFAULT), listed(REST), WEEKLY))
    return pytest.mark.parametrize(("case", "family"), params(*kept), ids=named)


every_case = each_case()
with_critic = each_case(lambda family: family not in WITHOUT_CRITIC)


@functools.cache
def load(results: Path, case: Case, family: str) -> dict[str, torch.Tensor]:
    found = torch.load(results / f"{case.name}-{family}.pt")
    assert not isinstance(found, str), found
    return found


# ------------------------------------------------------------------------------------------------ by PEFT


def gradients(model, pieces, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss(pieces, model.base_model.model, HYPER).backward()
    return plain_names({name: p.grad.clone() for name, p in trained(model).items()})


def values(model) -> dict[str, torch.Tensor]:
    return plain_names({name: p.detach().clone() for name, p in trained(model).items()})


def after_sgd(model, pieces, loss) -> dict[str, torch.Tensor]:
    gradients(model, pieces, loss)
    torch.nn.utils.clip_grad_norm_(trained(model).values(), SGD.clip_grad)
    torch.optim.SGD(trained(model).values(), lr=SGD.lr).step()
    return values(model)


def two_adam_steps(model, pieces, loss) -> dict[str, torch.Tensor]:
    own = {"lr": ADAM.lr, "eps": ADAM.eps, "betas": ADAM.betas, "weight_decay": ADAM.weight_decay}
    optimizer = torch.optim.AdamW(trained(model).values(), **own)
    for _ in range(2):
        gradients(model, pieces, loss)
        torch.nn.utils.clip_grad_norm_(trained(model).values(), ADAM.clip_grad)
        optimizer.step()
    return values(model)


@functools.cache
def ppo_by_peft(family: Path) -> dict[str, torch.Tensor]:
    policy = adapted(family / "policy", family.name, seed=1)
    critic = adapted(family / "policy", family.name, seed=2, score=True)
    models = {"policy": policy.base_model.model, "critic": critic.base_model.model}
    models["reference"] = AutoModelForCausalLM.from_pretrained(family / "policy", dtype=torch.float32)
    models["reward"] = AutoModelForSequenceClassification.from_pretrained(family / "reward", dtype=torch.float32)
    rollout = make_rollout()
    tokens = rollout.input_ids.split(rollout.lengths.tolist())
    episodes = [Episode(x, p) for x, p in zip(tokens, rollout.prompt_lengths.tolist(), strict=True)]
    estimate(episodes, models, HYPER)
    found = {f"ppo/{n}": packed(episodes, n) for n in ("log_probs", "ref_log_probs", "values", "advantages", "returns")}
    found["ppo/stat/actor/loss"] = actor_loss(episodes, models["policy"], HYPER).detach()
    grads = gradients(policy, episodes, actor_loss)
    found["ppo/stat/actor/grad_norm"] = torch.stack([x.norm() for x in grads.values()]).norm()
    found |= {f"ppo/actor_grad/{n}": x for n, x in grads.items()}
    found |= {f"ppo/critic_grad/{n}": x for n, x in gradients(critic, episodes, critic_loss).items()}
    found |= {f"ppo/actor_sgd/{n}": x for n, x in after_sgd(policy, episodes, actor_loss).items()}
    found |= {f"ppo/critic_sgd/{n}": x for n, x in after_sgd(critic, episodes, critic_loss).items()}
    policy = adapted(family / "policy", family.name, seed=1)
    return found | {f"adam/{n}": x for n, x in two_adam_steps(policy, episodes, actor_loss).items()}


def estimated_groups(family: Path, policy) -> list[grpo.Response]:
    models = {"policy": policy.base_model.model}
    models["reference"] = AutoModelForCausalLM.from_pretrained(family / "policy", dtype=torch.float32)
    models["reward"] = AutoModelForSequenceClassification.from_pretrained(family / "reward", dtype=torch.float32)
    rollout = make_groups()
    lengths = rollout.lengths.tolist()
    pieces = zip(rollout.input_ids.split(lengths), rollout.response_mask.split(lengths), strict=True)
    responses = [grpo.Response(x, m, g) for (x, m), g in zip(pieces, rollout.prompt_indices.tolist(), strict=True)]
    grpo.estimate(responses, models, HYPER)
    return responses


@functools.cache
def grpo_by_peft(family: Path) -> dict[str, torch.Tensor]:
    policy = adapted(family / "policy", family.name, seed=1)
    responses, rollout = estimated_groups(family, policy), make_groups()
    found = {}
    for name in ("log_probs", "ref_log_probs"):
        found[f"grpo/{name}"] = torch.zeros(len(rollout.input_ids))
        found[f"grpo/{name}"][rollout.response_mask] = torch.cat([getattr(r, name) for r in responses])
    found["grpo/stat/actor/loss"] = grpo.actor_loss(responses, policy.base_model.model, HYPER).detach()
    found |= {f"grpo/actor_grad/{n}": x for n, x in gradients(policy, responses, grpo.actor_loss).items()}
    return found | {f"grpo/actor_sgd/{n}": x for n, x in after_sgd(policy, responses, grpo.actor_loss).items()}


def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], family: str) -> None:
    """Gradients beside the largest of the model's, all else beside the largest value."""
    for kind in ("actor_grad", "critic_grad"):
        names = [name for name in expected if f"/{kind}/" in name]
        largest = max((expected[name].abs().max() for name in names), default=torch.tensor(1.0))
        for name in names:
            difference = (found[name] - expected[name]).abs().max() / largest
            assert difference <= tolerance_of(family), f"{name}: {difference:.2e} of the largest"
    for name in [name for name in expected if "_grad/" not in name]:
        if name.endswith("actor/loss"):  # a sum of terms of about 1, which nearly cancel
            assert abs(float(found[name] - expected[name])) < 2e-6, name
        else:
            assert_close(found[name], expected[name], name, tolerance_of(family))


# ------------------------------------------------------------------------------------------------ tests


@with_critic
def test_ppo_of_an_actor_and_a_critic_with_adapters(case, family, results, checkpoints):
    found, expected = load(results, case, family), ppo_by_peft(checkpoints / family)
    compare(found, {name: x for name, x in expected.items() if name.startswith("ppo/")}, family)
    critics = {name for name in expected if name.startswith("ppo/critic_grad/")}
    assert "ppo/critic_grad/score.weight" in critics and len(critics) > 1


@every_case
def test_grpo_whose_reference_is_the_actor(case, family, results, checkpoints):
    found, expected = load(results, case, family), grpo_by_peft(checkpoints / family)
    compare(found, expected, family)
    trained_here = {n for n in found if n.startswith("grpo/actor_grad/") and found[n].any()}
    assert trained_here == {name for name in expected if "/actor_grad/" in name}


@with_critic
def test_two_adam_steps_with_zero1(case, family, results, checkpoints):
    found, expected = load(results, case, family), ppo_by_peft(checkpoints / family)
    for name in [name for name in expected if name.startswith("adam/")]:
        assert_close(found[name], expected[name], name, tolerance_of(family))
        if case.dp > 1:
            assert_close(found[name.replace("adam", "overlapped")], expected[name], f"{name}, overlapped")


@every_case
def test_the_base_stays_and_has_no_gradients(case, family, results):
    found = load(results, case, family)
    assert found["grpo/base_is_as_it_was"]
    gradients_held, adapters = found["grpo/counts"].tolist()
    assert adapters <= gradients_held <= adapters * 1.2 + 4096, "padding apart, buffers are of the adapters alone"
    assert family in WITHOUT_CRITIC or found["one_base"], "actor and critic are on one copy of the base"


@every_case
def test_the_reference_is_the_base_bit_for_bit(case, family, results):
    found = load(results, case, family)
    same = torch.equal
    if family in TOLERANCES:  # a product with few rows is rounded by where in memory the inputs lie

        def same(one: torch.Tensor, other: torch.Tensor) -> bool:
            return torch.allclose(one, other, rtol=0, atol=tolerance_of(family))

    assert same(found["reference/off"], found["reference/base"])
    assert (found["reference/off"] - found["reference/actor"]).abs().max() > 0.01
    assert same(found["reference/kept"], found["reference/actor"])


@with_critic
def test_without_the_marks_gradients_or_their_norm_are_wrong(case, family, results, checkpoints):
    found, expected = load(results, case, family), ppo_by_peft(checkpoints / family)
    if case.sequence_parallel:
        names = [name for name in expected if name.startswith("ppo/actor_grad/")]
        off = {name: found[name.replace("ppo/actor_grad", "without_sequence_parallel")] for name in names}
        largest = max(expected[name].abs().max() for name in names)
        assert max((off[name] - expected[name]).abs().max() for name in names) > 0.05 * largest
    if case.tp > 1:
        right = expected["ppo/stat/actor/grad_norm"]
        assert abs(found["without_tensor_model_parallel/norm"] - right) > 0.01 * right


@functools.cache
def some_by_peft(family: Path, modules: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """As the worker begins: A drawn by name, B zero, for some of the linear layers."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANK, lora_alpha=12, target_modules=SOME)
    policy = get_peft_model(AutoModelForCausalLM.from_pretrained(family / "policy", dtype=torch.float32), config)
    with torch.no_grad():
        for name, parameter in trained(policy).items():
            if "lora_A" in name:
                module = name.removeprefix("base_model.model.").partition(".lora_A")[0]
                parameter.copy_(initial_a(module, *parameter.shape, 0))
    for _ in range(2):
        responses = estimated_groups(family, policy)
        before = two_steps_apart(policy, responses)
    return before


OPTIMIZERS: dict[int, torch.optim.AdamW] = {}


def two_steps_apart(policy, responses) -> dict[str, torch.Tensor]:
    """One Adam step, of an optimizer that goes on."""
    own = {"lr": ADAM.lr, "eps": ADAM.eps, "betas": ADAM.betas, "weight_decay": ADAM.weight_decay}
    optimizer = OPTIMIZERS.setdefault(id(policy), torch.optim.AdamW(trained(policy).values(), **own))
    gradients(policy, responses, grpo.actor_loss)
    torch.nn.utils.clip_grad_norm_(trained(policy).values(), ADAM.clip_grad)
    optimizer.step()
    return values(policy)


@each_case(lambda family: family == "llama")
def test_where_some_linear_layers_of_a_weight_have_adapters(case, family, results, checkpoints):
    """k_proj, gate_proj and up_proj have none: theirs stay zero beside q_proj's and v_proj's in one weight."""
    found, expected = load(results, case, family), some_by_peft(checkpoints / family, tuple(SOME))
    names = {f"some/{name}" for name in expected}
    for name in names:
        assert_close(found[name], expected[name.removeprefix("some/")], name)
    others = [name for name in found if name.startswith("some/") and name not in names]
    others = [name for name in others if "lora" in name and "grad" not in name and "sgd" not in name]
    assert others and all("k_proj" in name for name in others), "gate and up have no adapter at all"
    assert not any(found[name].any() for name in others)


def test_what_peft_adapts_by_default_is_what_all_linear_means() -> None:
    assert targets("llama") == ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
