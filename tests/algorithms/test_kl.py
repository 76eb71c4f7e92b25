from math import exp, expm1, log

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from hybridflow.algorithms.kl import KL_ESTIMATORS, AdaptiveKL, kl_k1, kl_k2, kl_k3, kl_k3_plus


def two_policies(scale: float = 1.0):
    """Logits of a policy (a leaf) and of a reference over nine actions, float64."""
    generator = torch.Generator().manual_seed(0)
    logits, noise = torch.randn(2, 9, dtype=torch.float64, generator=generator)
    return logits.requires_grad_(), logits.detach() + scale * noise


def expected_estimate(estimator, logits, ref_logits):
    """Exact expectation over tokens sampled from the policy, the sampling itself not differentiated."""
    log_probs = logits.log_softmax(0)
    return (log_probs.detach().exp() * estimator(log_probs, ref_logits.log_softmax(0))).sum()


def gradient(scalar, logits):
    return torch.autograd.grad(scalar, logits)[0]


def test_estimators_by_hand():
    log_probs = torch.tensor([log(0.5), log(0.25), -1.0])
    ref_log_probs = torch.tensor([log(0.25), log(0.5), -1.0])
    d = log(2.0)
    torch.testing.assert_close(kl_k1(log_probs, ref_log_probs), torch.tensor([d, -d, 0.0]))
    torch.testing.assert_close(kl_k2(log_probs, ref_log_probs), torch.tensor([d * d / 2, d * d / 2, 0.0]))
    torch.testing.assert_close(kl_k3(log_probs, ref_log_probs), torch.tensor([d - 0.5, 1.0 - d, 0.0]))


@pytest.mark.parametrize("estimator", [kl_k1, kl_k3])
def test_k1_and_k3_are_unbiased(estimator):
    logits, ref_logits = two_policies()
    exact = kl_divergence(Categorical(logits=logits), Categorical(logits=ref_logits))
    torch.testing.assert_close(expected_estimate(estimator, logits, ref_logits), exact)


def test_k2_is_biased_by_a_share_that_vanishes_as_the_policies_meet():
    def relative_bias(scale: float) -> float:
        logits, ref_logits = two_policies(scale)
        exact = kl_divergence(Categorical(logits=logits), Categorical(logits=ref_logits))
        return abs(float((expected_estimate(kl_k2, logits, ref_logits) / exact).detach()) - 1)

    assert relative_bias(1.0) > 0.02
    assert relative_bias(0.01) < 0.02
    assert relative_bias(0.0001) < 0.0002


def test_k2_and_k3_are_never_negative():
    log_probs, ref_log_probs = -torch.rand(2, 1000, generator=torch.Generator().manual_seed(1)) * 10
    assert (kl_k2(log_probs, ref_log_probs) >= 0).all()
    assert (kl_k3(log_probs, ref_log_probs) >= 0).all()
    assert (kl_k1(log_probs, ref_log_probs) < 0).any()


def test_as_a_loss_k1_has_no_expected_gradient():
    logits, ref_logits = two_policies()
    pull = gradient(expected_estimate(kl_k1, logits, ref_logits), logits)
    torch.testing.assert_close(pull, torch.zeros_like(pull))


def test_as_a_loss_k2_has_the_gradient_of_the_divergence_from_the_reference():
    logits, ref_logits = two_policies()
    pull = gradient(expected_estimate(kl_k2, logits, ref_logits), logits)
    exact = kl_divergence(Categorical(logits=logits), Categorical(logits=ref_logits))
    torch.testing.assert_close(pull, gradient(exact, logits))


def test_as_a_loss_k3_has_the_gradient_of_the_opposite_divergence():
    logits, ref_logits = two_policies()
    pull = gradient(expected_estimate(kl_k3, logits, ref_logits), logits)
    opposite = kl_divergence(Categorical(logits=ref_logits), Categorical(logits=logits))
    torch.testing.assert_close(pull, gradient(opposite, logits))
    exact = kl_divergence(Categorical(logits=logits), Categorical(logits=ref_logits))
    assert not torch.allclose(pull, gradient(exact, logits), rtol=0.05)


@pytest.mark.parametrize("d", [-60.0, -25.0, 25.0, 60.0])
def test_far_from_the_reference_the_gradient_is_still_that_of_the_estimate(d):
    """Nothing is clamped: the further away, the harder the pull. k3's gradient is 1 - exp(-d), k2's is d."""
    for estimator, expected in ((kl_k1, 1.0), (kl_k2, d), (kl_k3, -expm1(-d)), (kl_k3_plus, d)):
        log_probs = torch.tensor([d - 70.0], requires_grad=True)
        estimator(log_probs, torch.tensor([-70.0])).sum().backward()
        assert float(log_probs.grad) == pytest.approx(expected, rel=1e-5), estimator.__name__


def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2():
    logits, ref_logits = two_policies()
    log_probs, ref_log_probs = logits.log_softmax(0), ref_logits.log_softmax(0)
    torch.testing.assert_close(kl_k3_plus(log_probs, ref_log_probs), kl_k3(log_probs, ref_log_probs))
    pull = gradient(expected_estimate(kl_k3_plus, logits, ref_logits), logits)
    torch.testing.assert_close(pull, gradient(expected_estimate(kl_k2, logits, ref_logits), logits))


def test_k3_is_accurate_where_the_policies_nearly_agree():
    estimate = kl_k3(torch.tensor([-1e-3, 1e-3]), torch.zeros(2))
    torch.testing.assert_close(estimate, torch.tensor([5e-7, 5e-7]), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "k3+"])
def test_the_mapping_names_the_estimators_and_cannot_be_changed(name):
    assert KL_ESTIMATORS[name] is {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3, "k3+": kl_k3_plus}[name]
    assert set(KL_ESTIMATORS) == {"k1", "k2", "k3", "k3+"}
    with pytest.raises(TypeError):
        KL_ESTIMATORS[name] = kl_k1


@pytest.mark.parametrize("estimator", [kl_k1, kl_k2, kl_k3, kl_k3_plus])
def test_estimators_check_shapes(estimator):
    with pytest.raises(ValueError, match=r"^log_probs .*one dimension"):
        estimator(torch.zeros(2, 2), torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"^ref_log_probs .*as long as log_probs"):
        estimator(torch.zeros(3), torch.zeros(1))


@pytest.mark.parametrize(
    ("kl_mean", "coef"),
    [
        (6.0, 0.5),  # on target
        (6.6, 0.5 * (1 + 0.1 * 0.25)),  # a tenth above
        (5.4, 0.5 * (1 - 0.1 * 0.25)),  # a tenth below
        (7.2, 0.525),  # at the upper bound: 1 + 0.2 * 0.25
        (600.0, 0.525),
        (float("inf"), 0.525),
        (4.8, 0.475),  # at the lower bound
        (0.0, 0.475),
        (-50.0, 0.475),
    ],
)
def test_adaptive_coefficient_by_hand(kl_mean, coef):
    controller = AdaptiveKL(coef=0.5, target=6.0, horizon=256)
    updated = controller.updated(kl_mean, 64)
    assert updated.coef == pytest.approx(coef, rel=1e-12)
    assert (updated.target, updated.horizon, controller.coef) == (6.0, 256, 0.5)


def test_over_one_horizon_in_small_batches_a_full_error_multiplies_by_its_exponential():
    controller = AdaptiveKL(coef=1.0, target=6.0, horizon=10_000)
    for _ in range(10_000):
        controller = controller.updated(60.0, 1)
    assert controller.coef == pytest.approx(exp(0.2), rel=1e-5)


def test_adaptive_controller_reaches_the_target_where_kl_falls_with_the_coefficient():
    controller = AdaptiveKL(coef=0.01, target=2.0, horizon=100)
    for _ in range(500):
        controller = controller.updated(1.0 / controller.coef, 20)
    assert controller.coef == pytest.approx(0.5, rel=1e-6)


def test_adaptive_controller_rejects():
    with pytest.raises(ValueError, match=r"^target is 0.0: it must be positive"):
        AdaptiveKL(coef=0.1, target=0.0, horizon=10)
    with pytest.raises(ValueError, match=r"^horizon is -1: it must be positive"):
        AdaptiveKL(coef=0.1, target=1.0, horizon=-1)
    controller = AdaptiveKL(coef=0.1, target=1.0, horizon=10)
    with pytest.raises(ValueError, match=r"^kl_mean is nan"):
        controller.updated(float("nan"), 1)
    with pytest.raises(ValueError, match=r"^num_sequences is 50: it must be below 5 times horizon, 10"):
        controller.updated(1.0, 50)
    assert controller.updated(0.0, 49).coef > 0
