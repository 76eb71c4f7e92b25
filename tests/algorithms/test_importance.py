"""Weights between engine and trainer: by hand, and against loops."""

from math import exp, log

import pytest
import torch

from hybridflow.algorithms.importance import (
    geometric_band_weights,
    icepop_weights,
    sequence_importance_weights,
    truncated_importance_weights,
)

SEQUENCES = torch.tensor([4, 4, 4, 2, 2])
RATIOS = torch.tensor([2.0, 0.5, 1.5, 0.25, 0.5])
LOG_PROBS, ROLLOUT = RATIOS.log() - 1.0, torch.full((5,), -1.0)


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


def test_one_weight_a_sequence_by_hand():
    found = sequence_importance_weights(LOG_PROBS.requires_grad_(), ROLLOUT, SEQUENCES, cap=1.2)
    torch.testing.assert_close(found, torch.tensor([1.2, 1.2, 1.2, 0.125, 0.125]))  # 1.5, capped, and 1/8
    assert not found.requires_grad


def test_a_sum_that_is_large_stays_finite():
    found = sequence_importance_weights(torch.full((2,), 300.0), torch.zeros(2), torch.tensor([0, 0]), cap=1e30)
    assert found.tolist() == pytest.approx([exp(20.0)] * 2, rel=1e-6)


def test_the_geometric_band_by_hand():
    """The geometric means are 1.5^(1/3) = 1.145 and 8^(-1/2) = 0.354."""
    assert geometric_band_weights(LOG_PROBS, ROLLOUT, SEQUENCES, low=0.3, high=1.1).tolist() == [0, 0, 0, 1, 1]
    assert geometric_band_weights(LOG_PROBS, ROLLOUT, SEQUENCES, low=0.4, high=1.2).tolist() == [1, 1, 1, 0, 0]


def test_icepop_by_hand():
    found = icepop_weights(LOG_PROBS, ROLLOUT, low=0.45, high=1.6)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.5, 1.5, 0.0, 0.5]))
    assert not found.requires_grad


def test_where_engine_and_trainer_agree_every_weight_is_one():
    for found in (
        truncated_importance_weights(ROLLOUT, ROLLOUT, cap=2.0),
        sequence_importance_weights(ROLLOUT, ROLLOUT, SEQUENCES, cap=2.0),
        geometric_band_weights(ROLLOUT, ROLLOUT, SEQUENCES, low=1.0, high=1.0),
        icepop_weights(ROLLOUT, ROLLOUT, low=0.5, high=5.0),
    ):
        assert found.tolist() == [1.0] * 5


def test_each_equals_a_loop_over_sequences():
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(0, 30, (200,), generator=generator)
    log_probs, rollout = -torch.rand(2, 200, dtype=torch.float64, generator=generator) * 3
    expected = {"sequence": [], "geometric": [], "icepop": []}
    for t in range(200):
        of_sequence = [float(log_probs[s] - rollout[s]) for s in range(200) if sequences[s] == sequences[t]]
        w = exp(float(log_probs[t] - rollout[t]))
        expected["sequence"].append(min(exp(sum(of_sequence)), 3.0))
        expected["geometric"].append(float(0.8 <= exp(sum(of_sequence) / len(of_sequence)) <= 1.3))
        expected["icepop"].append(w if 0.5 <= w <= 2.0 else 0.0)
    found = {
        "sequence": sequence_importance_weights(log_probs, rollout, sequences, cap=3.0),
        "geometric": geometric_band_weights(log_probs, rollout, sequences, low=0.8, high=1.3),
        "icepop": icepop_weights(log_probs, rollout, low=0.5, high=2.0),
    }
    for name, values in expected.items():
        torch.testing.assert_close(found[name], torch.tensor(values, dtype=torch.float64))


def test_weights_check_shapes():
    with pytest.raises(ValueError, match=r"^log_probs .*one dimension"):
        truncated_importance_weights(torch.zeros(()), torch.zeros(()), cap=2.0)
    for function, options in (
        (sequence_importance_weights, {"cap": 2.0}),
        (geometric_band_weights, {"low": 1, "high": 1}),
    ):
        with pytest.raises(ValueError, match=r"^sequences .*as long as log_probs"):
            function(torch.zeros(3), torch.zeros(3), torch.zeros(1), **options)
    for function, options in ((truncated_importance_weights, {"cap": 2.0}), (icepop_weights, {"low": 1, "high": 1})):
        with pytest.raises(ValueError, match=r"^rollout_log_probs .*as long as log_probs"):
            function(torch.zeros(3), torch.zeros(1), **options)
