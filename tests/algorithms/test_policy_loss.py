from math import exp, log

import pytest
import torch

from hybridflow.algorithms import policy_loss
from hybridflow.algorithms.policy_loss import (
    approx_kl,
    cispo_policy_loss,
    clipped_high,
    clipped_low,
    probability_ratio,
    reinforce_policy_loss,
    sapo_policy_loss,
    sequence_ratio,
)

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
    ratio = torch.tensor(RATIOS)
    assert clipped_low(ratio, ADVANTAGES, clip_low=0.2).tolist() == [False, False, False, True, False, False]
    assert clipped_high(ratio, ADVANTAGES, clip_high=0.3).tolist() == [False, False, True, False, False, False]


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


def test_approx_kl_rejects():
    with pytest.raises(ValueError, match=r"^log_probs .*one dimension"):
        approx_kl(torch.zeros(()), torch.zeros(()))
    with pytest.raises(ValueError, match=r"^old_log_probs .*as long as log_probs"):
        approx_kl(torch.zeros(3), torch.zeros(1))


# ------------------------------------------------------------------------------------------------ the others


def test_the_ratio_of_a_sequence_by_hand():
    """Of 2, 8 and 4, 1: the geometric means 4 and 2; the gradient of a response's tokens is one of all of them."""
    sequences = torch.tensor([5, 1, 5, 1])
    log_probs = torch.tensor([2.0, 4.0, 8.0, 1.0]).log().requires_grad_()
    ratio = sequence_ratio(log_probs, torch.zeros(4), sequences)
    torch.testing.assert_close(ratio, torch.tensor([4.0, 2.0, 4.0, 2.0]))
    ratio[0].backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([2.0, 0.0, 2.0, 0.0]))  # s / 2


def test_with_one_token_a_sequence_gspo_is_ppo():
    log_probs, old, advantages = random_tokens(11)
    sequences = torch.randperm(len(old), generator=torch.Generator().manual_seed(12))
    gspo = policy_loss.clipped_policy_loss(sequence_ratio(log_probs, old, sequences), advantages, **CLIP)
    torch.testing.assert_close(gspo, clipped_policy_loss(log_probs, old, advantages, **CLIP))


def test_gspo_per_token_is_the_loss_of_the_paper_per_sequence():
    """With each token weighed by 1 / |o_i|, against a loop over responses, with the gradient."""
    log_probs, old, _ = random_tokens(13)
    generator = torch.Generator().manual_seed(14)
    sequences = torch.randint(0, 40, (len(old),), generator=generator).sort().values
    of_sequences = torch.randn(40, dtype=torch.float64, generator=generator)
    counts = sequences.bincount(minlength=40)
    leaf, other = log_probs.clone().requires_grad_(), log_probs.clone().requires_grad_()
    each = policy_loss.clipped_policy_loss(sequence_ratio(leaf, old, sequences), of_sequences[sequences], **CLIP)
    (each / counts[sequences]).sum().backward()
    total = 0.0
    for i in range(40):
        if counts[i]:
            mine = sequences == i
            s = ((other[mine] - old[mine]).sum() / counts[i]).exp()
            total = total - torch.minimum(s * of_sequences[i], s.clamp(0.8, 1.3) * of_sequences[i])
    total.backward()
    torch.testing.assert_close((each / counts[sequences]).sum(), total)
    torch.testing.assert_close(leaf.grad, other.grad)


@pytest.mark.parametrize("log_ratio", [-500.0, 500.0])
def test_an_extreme_ratio_of_a_sequence_is_held(log_ratio):
    found = sequence_ratio(torch.tensor([log_ratio, log_ratio]), torch.zeros(2), torch.tensor([0, 0]))
    assert found.tolist() == pytest.approx([exp(20.0 if log_ratio > 0 else -20.0)] * 2, rel=1e-5)


def test_cispo_by_hand():
    """-clip(ratio) A log p, whose gradient is -clip(ratio) A: what is clipped still has one."""
    loss, gradient = loss_and_gradient(
        lambda log_probs: cispo_policy_loss(torch.tensor(RATIOS), log_probs, ADVANTAGES, **CLIP), LOG_PROBS
    )
    weights = torch.tensor([0.8, 1.0, 1.3, 0.8, 1.0, 1.3])
    torch.testing.assert_close(loss, -weights * ADVANTAGES * LOG_PROBS)
    torch.testing.assert_close(gradient, torch.tensor([-1.6, -2.0, -2.6, 1.6, 2.0, 2.6]))


def test_no_gradient_flows_through_the_ratio_of_cispo():
    log_probs, old, advantages = random_tokens(15)

    def loss(leaf):
        return cispo_policy_loss(probability_ratio(leaf, old), leaf, advantages, clip_low=1.0, clip_high=4.0)

    _, gradient = loss_and_gradient(loss, log_probs)
    torch.testing.assert_close(gradient, -(log_probs - old).exp().clamp(0, 5) * advantages)


def test_sapo_by_hand():
    """sigmoid(ln 3) = 3/4 and sigmoid(-ln 3) = 1/4, where tau (r - 1) is that."""
    ratio = torch.tensor([1.0, 1 + log(3.0) / 2, 1 - log(3.0) / 4, 1 + log(3.0) / 4])
    advantages = torch.tensor([2.0, 2.0, -2.0, 0.0])
    found = sapo_policy_loss(ratio, advantages, tau_positive=2.0, tau_negative=4.0)
    torch.testing.assert_close(found, torch.tensor([-2.0, -3.0, 0.5, 0.0]))


def test_at_ratio_one_the_gradient_of_every_loss_is_that_of_ppo():
    _, old, advantages = random_tokens(16)
    ratio = of_log_probs(lambda ratio, advantages, **options: sapo_policy_loss(ratio, advantages, **options))
    _, sapo = loss_and_gradient(ratio, old, old, advantages, tau_positive=1.0, tau_negative=1.05)
    _, ppo = loss_and_gradient(clipped_policy_loss, old, old, advantages, **CLIP)
    _, cispo = loss_and_gradient(
        lambda leaf: cispo_policy_loss(probability_ratio(leaf, old), leaf, advantages, clip_low=1.0, clip_high=4.0), old
    )
    _, reinforce = loss_and_gradient(lambda leaf: reinforce_policy_loss(leaf, advantages), old)
    for found in (sapo, cispo, reinforce):
        torch.testing.assert_close(found, ppo)


def test_reinforce_by_hand():
    loss, gradient = loss_and_gradient(lambda leaf: reinforce_policy_loss(leaf, ADVANTAGES), OLD_LOG_PROBS)
    assert loss.tolist() == [2.0, 2.0, 2.0, -2.0, -2.0, -2.0]
    assert gradient.tolist() == [-2.0, -2.0, -2.0, 2.0, 2.0, 2.0]


def test_each_equals_a_loop_over_the_tokens():
    log_probs, old, advantages = random_tokens(17)
    ratio = (log_probs - old).exp()
    tokens = list(zip(ratio.tolist(), log_probs.tolist(), advantages.tolist(), strict=True))
    sapo = []
    for r, _, a in tokens:
        tau = 1.0 if a > 0 else 1.05
        sapo.append(-a / (1 + exp(-tau * (r - 1))) * 4 / tau)
    found = sapo_policy_loss(ratio, advantages, tau_positive=1.0, tau_negative=1.05)
    torch.testing.assert_close(found, torch.tensor(sapo, dtype=torch.float64))
    cispo = [-min(max(r, 0.8), 1.3) * a * lp for r, lp, a in tokens]
    found = cispo_policy_loss(ratio, log_probs, advantages, **CLIP)
    torch.testing.assert_close(found, torch.tensor(cispo, dtype=torch.float64))


def test_the_others_check_shapes():
    three, one = torch.zeros(3), torch.zeros(1)
    with pytest.raises(ValueError, match=r"^sequences .*as long as log_probs"):
        sequence_ratio(three, three, one)
    with pytest.raises(ValueError, match=r"^log_probs .*as long as ratio"):
        cispo_policy_loss(three, one, three, **CLIP)
    with pytest.raises(ValueError, match=r"^advantages .*as long as ratio"):
        sapo_policy_loss(three, one, tau_positive=1.0, tau_negative=1.0)
    with pytest.raises(ValueError, match=r"^advantages .*as long as log_probs"):
        reinforce_policy_loss(three, one)
