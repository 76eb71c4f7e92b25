"""The words of a config's `policy` and what they stand for, on two responses made by hand."""

from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

import pytest
import torch

from hybridflow.batch import PerToken, RolloutBatch, Tokens
from hybridflow.config.losses import KL, PolicyLoss
from hybridflow.roles.objectives import KLTerm, policy_loss, with_positive_nll

NO_KL = KLTerm(KL(use="none"), 0.0)
RATIOS = torch.tensor([2.0, 0.5, 4.0, 1.0])  # of the tokens of responses 0 (three of them) and 1
ADVANTAGES = torch.tensor([1.0, 1.0, 1.0, -2.0])
ENGINE = torch.tensor([0.5, 1.0, 4.0, 1.0])  # the trainer's probabilities before the update over the engine's
EXPONENT = exp(log(4.0) / 3)  # s of response 0: the geometric mean of 2, 1/2 and 4


@dataclass(frozen=True)
class Batch(RolloutBatch):
    log_probs: PerToken
    ref_log_probs: PerToken
    advantages: PerToken


def batch() -> Batch:
    """A prompt token each; the second response is cut at the limit. Old log-probs are -1."""
    mask = torch.tensor([False, True, True, True, False, True])
    spread = {name: torch.zeros(6) for name in ("rollout_log_probs", "advantages")}
    spread["rollout_log_probs"][mask] = -1.0 - ENGINE.log()
    spread["advantages"][mask] = ADVANTAGES
    return Batch(
        input_ids=torch.ones(6, dtype=torch.int64),
        lengths=torch.tensor([4, 2]),
        prompt_lengths=torch.tensor([1, 1]),
        prompt_indices=torch.tensor([3, 3]),
        truncated=torch.tensor([False, True]),
        response_mask=mask,
        log_probs=-1.0 * mask,
        ref_log_probs=-2.0 * mask,
        **spread,
    )


def losses(
    kl: KLTerm = NO_KL, given: Batch | None = None, **policy: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of each response token, and what is told beside it."""
    objective = policy_loss(PolicyLoss(**policy), kl)
    given = given or batch()
    tokens = Tokens(given, given.response_mask.nonzero()[:, 0], torch.device("cpu"))
    each, known = objective.loss(RATIOS.log() - 1.0, torch.full((4,), 0.5), tokens)
    assert set(objective.reports) == set(known)
    return each, dict(known)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({}, [-1.2, -0.5, -1.2, 2.0]),
        ({"clip_range_high": 0.5}, [-1.5, -0.5, -1.5, 2.0]),
        ({"kind": "gspo", "loss_mean": "sequence_token_mean"}, [-1.0004] * 3 + [2.0]),
        (
            {"kind": "gspo", "loss_mean": "sequence_token_mean", "clip_range_high": 9.0},
            [-EXPONENT, -EXPONENT, -EXPONENT, 2.0],
        ),
        # -min(ratio, 5) A log p, log p = log ratio - 1
        ({"kind": "cispo"}, [-2 * (log(2) - 1), -0.5 * (-log(2) - 1), -4 * (log(4) - 1), -2.0]),
        ({"kind": "reinforce"}, [1 - log(2), 1 + log(2), 1 - log(4), -2.0]),
        ({"kind": "sapo", "tau_positive": 2.0}, [-2 / (1 + exp(-2)), -2 / (1 + exp(1)), -2 / (1 + exp(-6)), 4 / 1.05]),
        ({"entropy_coef": 0.2}, [-1.3, -0.6, -1.3, 1.9]),
    ],
)
def test_a_kind_by_hand(policy: dict[str, Any], expected: list[float]) -> None:
    torch.testing.assert_close(losses(**policy)[0], torch.tensor(expected))


def test_the_dual_clip_is_where_the_advantage_is_negative_alone() -> None:
    assert losses(kind="dual_clip", dual_clip=1.01)[0].tolist() == losses()[0].tolist()  # the ratio there is 1


@pytest.mark.parametrize(
    ("importance", "weights", "out"),
    [
        ({"cap": 2.0}, [0.5, 1.0, 2.0, 1.0], [0, 0, 1, 0]),
        ({"kind": "sequence", "cap": 3.0}, [2.0, 2.0, 2.0, 1.0], [0, 0, 0, 0]),
        ({"kind": "sequence", "cap": 1.5}, [1.5, 1.5, 1.5, 1.0], [1, 1, 1, 0]),
        ({"kind": "geometric", "low": 0.9, "high": 1.2}, [0.0, 0.0, 0.0, 1.0], [1, 1, 1, 0]),
        ({"kind": "icepop", "low": 0.6, "high": 5.0}, [0.0, 1.0, 4.0, 1.0], [1, 0, 0, 0]),
    ],
)
def test_weights_between_engine_and_trainer_by_hand(importance: dict[str, Any], weights: list, out: list) -> None:
    """Of the policy's term alone: neither the entropy bonus nor the KL is weighed."""
    kl = KLTerm(KL(use="loss", estimator="k2"), 0.1)
    found, known = losses(kl, importance=importance, entropy_coef=0.2)
    plain = losses(kl, entropy_coef=0.2)[0] - losses()[0]
    torch.testing.assert_close(found, losses()[0] * torch.tensor(weights) + plain)
    assert known["weights_out_of_bounds"].tolist() == [bool(x) for x in out]


def test_clip_fractions_by_side() -> None:
    known = losses(clip_range_high=1.5)[1]
    assert known["clip_fraction_high"].tolist() == known["clip_fraction"].tolist() == [False, False, True, False]
    assert known["clip_fraction_low"].tolist() == [False] * 4
    known = losses(kind="cispo", clip_range=0.4, clip_range_high=1.5)[1]
    assert known["clip_fraction_low"].tolist() == [False, True, False, False]
    for kind in ("sapo", "reinforce"):
        assert list(losses(kind=kind)[1]) == ["approx_kl"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_mean", 10 / 4),
        ("sequence_token_mean", (6 / 3 + 4) / 2),
        ("sequence_sum_mean", 10 / 2),
        ("constant", 10 / (2 * 7)),
        ("prompt_mean", 10 / 4),  # both answer one prompt
    ],
)
def test_a_loss_mean_by_hand(name: Any, expected: float) -> None:
    """Of losses 1, 2, 3 and 4; where cut responses are masked, of the first three."""
    each = torch.tensor([9.0, 1.0, 2.0, 3.0, 9.0, 4.0])
    weights, divisor = policy_loss(PolicyLoss(loss_mean=name), NO_KL, max_response_length=7).mean(batch())
    assert float((weights * each).sum() / divisor) == pytest.approx(expected)
    masked = policy_loss(PolicyLoss(loss_mean=name, mask_truncated=True), NO_KL, max_response_length=7).mean(batch())
    one = {"sequence_sum_mean": 6.0, "constant": 6 / 7}.get(name, 2.0)
    assert float((masked.weights * each).sum() / masked.divisor) == pytest.approx(one)
    every = replace(batch(), truncated=torch.ones(2, dtype=torch.bool))
    weights, divisor = policy_loss(PolicyLoss(loss_mean=name, mask_truncated=True), NO_KL, max_response_length=7).mean(
        every
    )
    assert weights.tolist() == [0.0] * 6 and divisor >= 1


@pytest.mark.parametrize("kind", ["clip", "dual_clip", "gspo", "cispo", "sapo", "reinforce"])
def test_nothing_outside_the_responses_is_read(kind: str) -> None:
    """Loss, reports and mean, with NaN in prompts and gaps, are those with zeros there."""
    policy = {"kind": kind, "entropy_coef": 0.1, "importance": {"kind": "sequence", "cap": 3.0}}
    policy |= {"loss_mean": "sequence_token_mean"} if kind == "gspo" else {}
    kl, plain = KLTerm(KL(use="loss", estimator="k3"), 0.1), batch()
    names = ("log_probs", "ref_log_probs", "rollout_log_probs", "advantages")
    spoilt = replace(
        plain, **{name: getattr(plain, name).masked_fill(~plain.response_mask, float("nan")) for name in names}
    )
    (expected, known), (found, told) = losses(kl, plain, **policy), losses(kl, spoilt, **policy)
    assert torch.equal(found, expected) and all(torch.equal(told[name], known[name]) for name in known)
    mean = policy_loss(PolicyLoss(**policy), kl).mean
    assert torch.equal(mean(spoilt).weights, mean(plain).weights) and mean(spoilt).divisor == mean(plain).divisor


def test_right_responses_are_learnt_by_heart_with_a_mean_of_their_own() -> None:
    """Of the first response alone: -(mean of log p over its three tokens), whatever part of the tokens is looked at."""
    given, log_probs = batch(), RATIOS.log() - 1.0
    places, plain = given.response_mask.nonzero()[:, 0], policy_loss(PolicyLoss(), NO_KL)
    objective = with_positive_nll(plain, given, torch.tensor([True, False]), 0.1)

    def total(of: Any) -> float:
        weights, divisor = of.mean(given)
        parts = [slice(0, 2), slice(2, 4)]  # as two micro-batches
        each = [of.loss(log_probs[p], log_probs[p], Tokens(given, places[p], log_probs.device))[0] for p in parts]
        return float((torch.cat(each) * weights[places]).sum() / divisor)

    assert total(objective) - total(plain) == pytest.approx(-0.1 * float(log_probs[:3].mean()), rel=1e-5)
    nobody = with_positive_nll(plain, given, torch.tensor([False, False]), 0.1)
    assert total(nobody) == total(plain)


def test_a_constant_needs_the_length_that_it_is() -> None:
    with pytest.raises(ValueError, match=r"^loss_mean: constant needs max_response_length"):
        policy_loss(PolicyLoss(loss_mean="constant"), NO_KL)


@pytest.mark.parametrize(
    "policy",
    [{}, {"kind": "cispo"}, {"importance": {"kind": "token", "cap": 2.0}}],
)
def test_what_a_loss_reads_is_sent_to_the_device_without_a_wait(
    policy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From page-locked memory. A device without numbers stands for a GPU: whoever waited for one would fail."""
    given, device, sent = batch(), torch.device("meta"), []
    pinned: set[int] = set()
    send = torch.Tensor.to

    def pin(x: torch.Tensor) -> torch.Tensor:
        pinned.add(x.data_ptr())
        return x

    def to(x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        if args and args[0] == device and x.device != device:
            sent.append((x.data_ptr() in pinned, named.get("non_blocking", False)))
        return send(x, *args, **named)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    objective = policy_loss(PolicyLoss(**policy), KLTerm(KL(use="loss"), 0.1))
    outputs = torch.zeros(4, device=device)
    each, _ = objective.loss(outputs, outputs, Tokens(given, given.response_mask.nonzero()[:, 0], device))
    assert each.shape == (4,)
    assert len(sent) >= 3 and set(sent) == {(True, True)}
