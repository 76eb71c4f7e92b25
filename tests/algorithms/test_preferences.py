"""Losses of completions that are given: values by hand, identities, gradients by differences."""

import math

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.preferences import (
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    kto_loss,
    kto_reference_point,
)


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_bradley_terry_by_hand() -> None:
    loss = bradley_terry_loss(floats(2.0, 0.0, 1.0), floats(1.0, 0.0, 1.0), floats(0.0, 0.0, 1.0))
    # -log sigma(1) = log(1 + e^-1), -log sigma(0) = log 2, -log sigma(-1) = log(1 + e)
    assert loss.tolist() == pytest.approx([0.31326168751822286, math.log(2), 1.3132616875182228])


def test_bradley_terry_depends_on_differences_alone() -> None:
    one = bradley_terry_loss(floats(2.0), floats(1.5), floats(0.25))
    assert torch.equal(one, bradley_terry_loss(floats(7.0), floats(6.5), floats(0.25)))
    assert float(bradley_terry_loss(floats(1.25), floats(1.0), floats(0.25))) == pytest.approx(math.log(2))


def test_dpo_is_log_2_where_policy_and_reference_agree() -> None:
    for beta, smoothing in ((0.1, 0.0), (2.0, 0.3)):
        loss = dpo_loss(floats(0.0, 0.0), floats(0.0, 0.0), beta=beta, label_smoothing=smoothing)
        assert loss.tolist() == pytest.approx([math.log(2)] * 2)


def test_dpo_by_hand() -> None:
    # beta (3 - 1) = 1: -log sigma(1) = 0.3132..., and -log sigma(-1) = 1.3132... is one more
    loss = dpo_loss(floats(3.0), floats(1.0), beta=0.5)
    assert float(loss) == pytest.approx(0.31326168751822286)
    assert float(dpo_loss(floats(3.0), floats(1.0), beta=0.5, label_smoothing=0.1)) == pytest.approx(
        0.31326168751822286 + 0.1
    )


def test_dpo_s_gradient_is_beta_times_the_odds_of_being_wrong() -> None:
    chosen, rejected = floats(3.0).requires_grad_(), floats(1.0).requires_grad_()
    dpo_loss(chosen, rejected, beta=0.5).sum().backward()
    wrong = 1 / (1 + math.e)  # sigma(-1)
    assert float(chosen.grad) == pytest.approx(-0.5 * wrong)
    assert float(rejected.grad) == pytest.approx(0.5 * wrong)


def test_ipo_by_hand_and_where_it_rests() -> None:
    # 1 / (2 x 0.1) = 5: (2 - 5)^2 = 9
    chosen = floats(3.0, 6.0).requires_grad_()
    loss = ipo_loss(chosen, floats(1.0, 1.0), beta=0.1)
    assert loss.tolist() == pytest.approx([9.0, 0.0])
    loss.sum().backward()
    assert chosen.grad.tolist() == pytest.approx([-6.0, 0.0])


def test_kto_s_point_is_a_mean_and_not_negative() -> None:
    assert float(kto_reference_point(floats(1.0, -0.5, 2.5))) == pytest.approx(1.0)
    assert float(kto_reference_point(floats(1.0, -5.0))) == 0.0
    assert not kto_reference_point(floats(1.0).requires_grad_()).requires_grad


def test_kto_by_hand() -> None:
    log_ratios = floats(3.0, 3.0).requires_grad_()
    loss = kto_loss(
        log_ratios,
        torch.tensor([True, False]),
        torch.tensor(1.0, dtype=torch.float64),
        beta=0.5,
        desirable_weight=2.0,
        undesirable_weight=3.0,
    )
    right = 1 / (1 + math.exp(-1))  # sigma(0.5 (3 - 1)) = sigma(1)
    assert loss.tolist() == pytest.approx([2 * (1 - right), 3 * right])
    loss.sum().backward()
    slope = 0.5 * right * (1 - right)
    assert log_ratios.grad.tolist() == pytest.approx([-2 * slope, 3 * slope])


def test_kto_is_half_its_weight_at_the_point() -> None:
    loss = kto_loss(floats(0.7, 0.7), torch.tensor([True, False]), torch.tensor(0.7), beta=0.3)
    assert loss.tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(
    "loss",
    [
        lambda x: bradley_terry_loss(x, x, floats(1.0)),
        lambda x: dpo_loss(x, floats(1.0), beta=0.1),
        lambda x: ipo_loss(x, floats(1.0), beta=0.1),
        lambda x: kto_loss(x, torch.tensor([True]), torch.tensor(0.0), beta=0.1),
        lambda x: kto_reference_point(x[:0]),
    ],
)
def test_shapes_are_checked(loss) -> None:
    with pytest.raises(ValueError, match="must"):
        loss(floats(1.0, 2.0))


def test_kto_takes_labels_as_booleans() -> None:
    with pytest.raises(ValueError, match="be boolean"):
        kto_loss(floats(1.0), floats(1.0), torch.tensor(0.0), beta=0.1)
