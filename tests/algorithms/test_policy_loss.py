from math import exp, log

import pytest
import torch

from hybridflow.algorithms import policy_loss
from hybridflow.algorithms.policy_loss import approx_kl, probability_ratio, truncated_importance_weights

CLIP = {"clip_low": 0.2, "clip_high": 0.3}
# Ratios below, inside and above [0.8, 1.3], each with a positive and with a negative advantage of size 2.
RATIOS = [0.5, 1.0, 2.0, 0.5, 1.0, 2.0]
ADVANTAGES = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
LOG_PROBS = torch.tensor([log(r) - 1.0 for r in RATIOS])
OLD_LOG_PROBS = torch.full((6,), -1.0)


def of_log_probs(function):
    """A loss of ratios as one of (log_probs, old_log_probs, advantages): gradients then are those of log-probs."""

    def loss(log_probs, old_log_probs, advantages, **options):
        return function(probability_ratio(log_probs, old_log_probs), advantages, **options)

    return loss


clipped_policy_loss = of_log_probs(policy_loss.clipped_policy_loss)
dual_clipped_policy_loss = of_log_probs(policy_loss.dual_clipped_policy_loss)
clipped_tokens = of_log_probs(policy_loss.clipped_tokens)


def random_tokens(seed: int, num_tokens: int = 400):
    """log_probs, old_log_probs and advantages (float64), with ratios well beyond both bounds."""
    generator = torch.Generator().manual_seed(seed)
    old, noise, advantages = torch.randn(3, num_tokens, dtype=torch.float64, generator=generator)
    old = -old.abs() - 2.0
    return old + 0.5 * noise, old, advantages


def loss_and_gradient(loss_function, log_probs, *others, **options):
    leaf = log_probs.clone().requires_grad_()
    loss = loss_function(leaf, *others, **options)
    loss.sum().backward()
    return loss.detach(), leaf.grad


def test_clipped_loss_and_gradient_by_hand():
    loss, gradient = loss_and_gradient(clipped_policy_loss, LOG_PROBS, OLD_LOG_PROBS, ADVANTAGES, **CLIP)
    torch.testing.assert_close(loss, torch.tensor([-1.0, -2.0, -2.6, 1.6, 2.0, 4.0]))
    # The gradient of the unclipped branch is -A r; the third and the fourth token are clipped.
    torch.testing.assert_close(gradient, torch.tensor([-1.0, -2.0, 0.0, 0.0, 2.0, 4.0]))
    assert gradient[2] == 0.0 and gradient[3] == 0.0


def test_clipped_tokens_by_hand():
    clipped = clipped_tokens(LOG_PROBS, OLD_LOG_PROBS, ADVANTAGES, **CLIP)
    assert clipped.tolist() == [False, False, True, True, False, False]


def test_at_ratio_one_the_gradient_is_minus_the_advantage():
    _, old, advantages = random_tokens(0)
    loss, gradient = loss_and_gradient(clipped_policy_loss, old, old, advantages, **CLIP)
    assert torch.equal(loss, -advantages)
    assert torch.equal(gradient, -advantages)
    assert not clipped_tokens(old, old, advantages, **CLIP).any()


def test_gradient_is_the_analytic_one_and_exactly_zero_where_clipped():
    log_probs, old, advantages = random_tokens(1)
    ratio = (log_probs - old).exp()
    clipped = clipped_tokens(log_probs, old, advantages, **CLIP)
    assert 0.1 < clipped.double().mean() < 0.9
    loss, gradient = loss_and_gradient(clipped_policy_loss, log_probs, old, advantages, **CLIP)
    assert (gradient[clipped] == 0.0).all()
    torch.testing.assert_close(gradient[~clipped], -(advantages * ratio)[~clipped])
    torch.testing.assert_close(loss[~clipped], -(advantages * ratio)[~clipped])
    bound = torch.where(advantages > 0, 1.3, 0.8).double()
    torch.testing.assert_close(loss[clipped], -(advantages * bound)[clipped])


def test_clipped_loss_is_never_below_the_unclipped_one():
    log_probs, old, advantages = random_tokens(2)
    loss = clipped_policy_loss(log_probs, old, advantages, **CLIP)
    assert (loss >= -(log_probs - old).exp() * advantages).all()


def test_wide_bounds_never_clip():
    log_probs, old, advantages = random_tokens(3)
    loss = clipped_policy_loss(log_probs, old, advantages, clip_low=1.0, clip_high=1e6)
    torch.testing.assert_close(loss, -(log_probs - old).exp() * advantages)


def test_tokens_outside_the_response_cost_nothing():
    zeros = torch.zeros(3)
    loss, gradient = loss_and_gradient(clipped_policy_loss, zeros, zeros, zeros, **CLIP)
    assert loss.tolist() == [0.0] * 3 and gradient.tolist() == [0.0] * 3
    assert clipped_tokens(zeros, zeros, zeros, **CLIP).tolist() == [False] * 3


@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-500.0, 500.0])
def test_extreme_ratios_keep_loss_and_gradient_finite(advantage, log_ratio):
    inputs = torch.tensor([log_ratio - 600.0]), torch.tensor([-600.0]), torch.tensor([advantage])
    loss, gradient = loss_and_gradient(clipped_policy_loss, *inputs, **CLIP)
    assert loss.isfinite().all() and gradient.isfinite().all()
    if advantage < 0 < log_ratio:
        assert loss[0] == pytest.approx(exp(20.0), rel=1e-5)


def test_dual_clip_by_hand():
    ratios = torch.tensor([0.5, 2.0, 3.0, 5.0, 5.0])
    advantages = torch.tensor([-2.0, -2.0, -2.0, -2.0, 2.0])
    inputs = ratios.log(), torch.zeros(5), advantages
    loss, gradient = loss_and_gradient(dual_clipped_policy_loss, *inputs, **CLIP, dual_clip=2.5)
    torch.testing.assert_close(loss, torch.tensor([1.6, 4.0, 5.0, 5.0, -2.6]))
    torch.testing.assert_close(gradient, torch.tensor([0.0, 4.0, 0.0, 0.0, 0.0]))


def test_dual_clip_follows_the_paper_and_bounds_only_negative_advantages():
    log_probs, old, advantages = random_tokens(4)
    ratio = (log_probs - old).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages)
    expected = -torch.where(advantages < 0, torch.maximum(objective, 1.5 * advantages), objective)
    loss = dual_clipped_policy_loss(log_probs, old, advantages, **CLIP, dual_clip=1.5)
    torch.testing.assert_close(loss, expected)
    single = clipped_policy_loss(log_probs, old, advantages, **CLIP)
    assert torch.equal(loss[advantages > 0], single[advantages > 0])
    assert (loss < single).any()
    assert torch.equal(dual_clipped_policy_loss(log_probs, old, advantages, **CLIP, dual_clip=1e9), single)


def test_approx_kl_by_hand():
    log_probs = torch.tensor([log(2.0), log(0.5), 0.0])
    expected = torch.tensor([2.0 - 1.0 - log(2.0), 0.5 - 1.0 + log(2.0), 0.0])
    torch.testing.assert_close(approx_kl(log_probs, torch.zeros(3)), expected)


def test_approx_kl_is_in_expectation_the_divergence_of_old_from_new():
    logits, old_logits = torch.randn(2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    new = torch.distributions.Categorical(logits=logits)
    old = torch.distributions.Categorical(logits=old_logits)
    estimates = approx_kl(new.logits, old.logits)  # (actions,), each weighed by its probability under old
    torch.testing.assert_close((old.probs * estimates).sum(), torch.distributions.kl_divergence(old, new))
    assert (estimates >= 0).all()


def test_approx_kl_is_accurate_for_small_steps_and_detached():
    log_probs = torch.tensor([1e-3, -1e-3], requires_grad=True)
    estimates = approx_kl(log_probs, torch.zeros(2))
    torch.testing.assert_close(estimates, torch.tensor([5e-7, 5e-7]), rtol=1e-3, atol=0.0)
    assert not estimates.requires_grad


def test_truncated_importance_weights_by_hand():
    rollout_log_probs = torch.tensor([-1.0, -1.0, -1.0, -1.0, 0.0])
    log_ratios = torch.tensor([0.0, log(1.5), log(4.0), -log(4.0), 500.0])
    log_probs = (rollout_log_probs + log_ratios).requires_grad_()
    weights = truncated_importance_weights(log_probs, rollout_log_probs, cap=2.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, 1.5, 2.0, 0.25, 2.0]))
    assert not weights.requires_grad


def test_uncapped_importance_weights_turn_one_expectation_into_another():
    logits, rollout_logits, x = torch.randn(3, 9, generator=torch.Generator().manual_seed(6))
    log_probs, rollout_log_probs = logits.log_softmax(0), rollout_logits.log_softmax(0)
    weights = truncated_importance_weights(log_probs, rollout_log_probs, cap=1e9)
    torch.testing.assert_close((rollout_log_probs.exp() * weights * x).sum(), (log_probs.exp() * x).sum())


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (clipped_policy_loss, CLIP),
        (dual_clipped_policy_loss, CLIP | {"dual_clip": 3.0}),
        (clipped_tokens, CLIP),
    ],
)
def test_three_tensor_functions_reject(function, options):
    with pytest.raises(ValueError, match=r"^log_probs .*one dimension"):
        function(torch.zeros(1, 3), torch.zeros(3), torch.zeros(3), **options)
    with pytest.raises(ValueError, match=r"^old_log_probs .*as long as log_probs"):
        function(torch.zeros(3), torch.zeros(2), torch.zeros(3), **options)
    with pytest.raises(ValueError, match=r"^advantages .*as long as ratio"):
        function(torch.zeros(3), torch.zeros(3), torch.zeros(1), **options)


@pytest.mark.parametrize(
    ("function", "options", "second"),
    [(approx_kl, {}, "old_log_probs"), (truncated_importance_weights, {"cap": 2.0}, "rollout_log_probs")],
)
def test_two_tensor_functions_reject(function, options, second):
    with pytest.raises(ValueError, match=r"^log_probs .*one dimension"):
        function(torch.zeros(()), torch.zeros(()), **options)
    with pytest.raises(ValueError, match=rf"^{second} .*as long as log_probs"):
        function(torch.zeros(3), torch.zeros(1), **options)
