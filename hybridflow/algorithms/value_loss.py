"""Losses of the critic per token, not reduced, and how much of the returns it explains."""

import torch
from torch import Tensor

from hybridflow.algorithms.checks import require_flat, require_mask
from hybridflow.algorithms.packed import select_masked


def squared_value_loss(values: Tensor, returns: Tensor) -> Tensor:
    """Half the squared error.

        L_t = (V_t - R_t)^2 / 2

    Schulman et al. 2017, arXiv 1707.06347, equation 9 (there without the half).

    Args:
        values: float (T,), the critic's; the gradient flows through these.
        returns: float (T,), targets.

    Returns:
        float (T,).

    Raises:
        ValueError: the tensors are not all (T,).
    """
    require_flat(values=values, returns=returns)
    return 0.5 * (values - returns).square()


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip_range: float) -> Tensor:
    """Half the larger of two squared errors: that of the value, and that of the value held near the old one.

        L_t = max((V_t - R_t)^2, (W_t - R_t)^2) / 2
        W_t = V_old_t + clip(V_t - V_old_t, -clip_range, clip_range)

    There is no gradient where the value has left the range and fits the return better than it could inside.
    Engstrom et al. 2020, arXiv 2005.12729, on value function clipping.

    Args:
        values: float (T,), the critic's; the gradient flows through these.
        old_values: float (T,), before this iteration's updates.
        returns: float (T,), targets.
        clip_range: half-width of the range, in units of the value, > 0.

    Returns:
        float (T,).

    Raises:
        ValueError: the tensors are not all (T,).
    """
    require_flat(values=values, old_values=old_values, returns=returns)
    near_values = old_values + (values - old_values).clamp(-clip_range, clip_range)
    return 0.5 * torch.maximum((values - returns).square(), (near_values - returns).square())


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Share of the variance of the returns that the values account for.

        1 - Var(R - V) / Var(R)

    1 for a perfect critic, 0 for a constant one, negative for one that is worse than a constant.

    Args:
        values: float (T,).
        returns: float (T,).
        mask: bool (T,), the tokens to count; the rest is not read.

    Returns:
        0-d tensor, detached; 0 where the returns do not vary.

    Raises:
        ValueError: a shape or dtype is not as above.
    """
    require_flat(values=values, returns=returns, mask=mask)
    require_mask(mask=mask)
    targets = select_masked(returns, mask).double()
    total = targets.var(correction=0)
    explained = 1 - targets.sub_(select_masked(values, mask)).var(correction=0) / total  # by now they are the errors
    return torch.where(total > 0, explained, 0.0).to(values.dtype)
