import pytest
import torch

from hybridflow.algorithms.value_loss import clipped_value_loss, explained_variance, squared_value_loss


def test_squared_loss_and_gradient_by_hand():
    values = torch.tensor([1.0, 2.0, -1.0], requires_grad=True)
    loss = squared_value_loss(values, torch.tensor([3.0, 2.0, 0.0]))
    assert loss.tolist() == [2.0, 0.0, 0.5]
    loss.sum().backward()
    assert values.grad.tolist() == [-2.0, 0.0, -1.0]


def test_squared_loss_equals_half_of_torch_mse():
    values, returns = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    expected = 0.5 * torch.nn.functional.mse_loss(values, returns, reduction="none")
    torch.testing.assert_close(squared_value_loss(values, returns), expected)


def test_clipped_loss_and_gradient_by_hand():
    # Around an old value of 0 and within 0.5: inside; beyond, towards the return; beyond, away from it;
    # beyond and past the return, further from it than the bound is; the same, but nearer than the bound.
    values = torch.tensor([0.25, 1.0, 1.0, 1.0, 1.0], requires_grad=True)
    returns = torch.tensor([1.25, 3.0, -1.0, 0.5, 0.875])
    loss = clipped_value_loss(values, torch.zeros(5), returns, clip_range=0.5)
    assert loss.tolist() == [0.5, 3.125, 2.0, 0.125, 0.0703125]
    loss.sum().backward()
    assert values.grad.tolist() == [-1.0, 0.0, 2.0, 0.5, 0.0]


def test_clipped_loss_is_the_squared_loss_within_the_range_and_never_smaller():
    generator = torch.Generator().manual_seed(1)
    values, noise, returns = torch.randn(3, 200, dtype=torch.float64, generator=generator)
    old_values = values + noise
    squared = squared_value_loss(values, returns)
    torch.testing.assert_close(clipped_value_loss(values, old_values, returns, clip_range=100.0), squared)
    clipped = clipped_value_loss(values, old_values, returns, clip_range=0.2)
    assert (clipped >= squared).all() and (clipped > squared).any()
    near = torch.minimum(torch.maximum(values, old_values - 0.2), old_values + 0.2)
    expected = torch.stack([(values - returns) ** 2, (near - returns) ** 2]).amax(0) / 2
    torch.testing.assert_close(clipped, expected)


def test_explained_variance_by_hand():
    returns = torch.tensor([0.0, 2.0, 4.0, 6.0, 99.0])
    values = torch.tensor([1.0, 1.0, 5.0, 5.0, -99.0])
    mask = torch.tensor([True, True, True, True, False])
    # R - V = -1, 1, -1, 1 of variance 1; R of variance (9 + 1 + 1 + 9) / 4 = 5
    actual = explained_variance(values, returns, mask)
    torch.testing.assert_close(actual, torch.tensor(0.8))
    assert not explained_variance(values.requires_grad_(), returns, mask).requires_grad


def test_explained_variance_of_perfect_shifted_constant_and_opposite_values():
    returns = torch.randn(100, generator=torch.Generator().manual_seed(2))
    mask = torch.arange(100) % 3 > 0
    assert explained_variance(returns, returns, mask) == 1.0
    torch.testing.assert_close(explained_variance(returns + 5.0, returns, mask), torch.tensor(1.0))
    torch.testing.assert_close(explained_variance(torch.full((100,), 5.0), returns, mask), torch.tensor(0.0))
    torch.testing.assert_close(explained_variance(-returns, returns, mask), torch.tensor(-3.0))


def test_explained_variance_is_zero_where_the_returns_do_not_vary():
    returns = torch.full((7,), 0.1)
    values = torch.arange(7.0)
    assert explained_variance(values, returns, torch.ones(7, dtype=torch.bool)) == 0.0
    assert explained_variance(values, returns, torch.arange(7) == 3) == 0.0


def test_explained_variance_does_not_read_outside_the_mask():
    values, returns = torch.randn(2, 60, generator=torch.Generator().manual_seed(3))
    mask = torch.arange(60) % 2 == 0
    expected = explained_variance(values, returns, mask)
    filled = values.masked_fill(~mask, float("nan")), returns.masked_fill(~mask, float("inf"))
    assert torch.equal(explained_variance(*filled, mask), expected)
    assert torch.equal(explained_variance(values[mask], returns[mask], mask[mask]), expected)


def test_shapes_are_checked():
    three, two = torch.zeros(3), torch.zeros(2)
    with pytest.raises(ValueError, match=r"^values .*one dimension"):
        squared_value_loss(torch.zeros(3, 1), three)
    with pytest.raises(ValueError, match=r"^returns .*as long as values"):
        squared_value_loss(three, two)
    with pytest.raises(ValueError, match=r"^old_values .*as long as values"):
        clipped_value_loss(three, two, three, clip_range=0.2)
    with pytest.raises(ValueError, match=r"^returns .*as long as values"):
        clipped_value_loss(three, three, two, clip_range=0.2)
    with pytest.raises(ValueError, match=r"^mask .*as long as values"):
        explained_variance(three, three, two.bool())
    with pytest.raises(ValueError, match=r"^mask .*boolean"):
        explained_variance(three, three, three)
