"""Losses that compare completions which are given: of pairs, and of single ones that are good or bad. Not generated.

They couple the sequences of a batch, so they are taken of whole per-sequence tensors, and a role makes a step along
their derivatives. h_i is the log-ratio log pi(y_i | x_i) - log pi_ref(y_i | x_i) of a completion, a sum over tokens
(`sequence_sums`), in nats.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybridflow.algorithms.checks import require_flat, require_mask, require_nonempty


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margins: Tensor) -> Tensor:
    """-log of the probability that the better completion of a pair wins, by a margin.

        L_i = -log sigma(c_i - r_i - m_i)

    Bradley and Terry 1952; Ouyang et al. 2022, arXiv 2203.02155, equation 1; the margin is that of Touvron et al. 2023,
    arXiv 2307.09288, equation 2.

    Args:
        chosen, rejected: float (P,), scores of the two completions of each pair; the gradient flows through these.
        margins: float (P,), by how much the chosen one should be better, in units of the score; 0 where nobody said.

    Returns:
        float (P,), each log 2 where the scores differ by just the margin.

    Raises:
        ValueError: the tensors are not all (P,).
    """
    require_flat(chosen=chosen, rejected=rejected, margins=margins)
    return -logsigmoid(chosen - rejected - margins)


def dpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Direct preference optimisation.

        L_i = -(1 - e) log sigma(beta (h_c - h_r)) - e log sigma(-beta (h_c - h_r))

    Rafailov et al. 2023, arXiv 2305.18290, equation 7, which is e = 0; with e the "conservative DPO" of the authors.

    Args:
        chosen, rejected: float (P,), the log-ratios h of each pair; the gradient flows through these.
        beta: strength of the pull to the reference, > 0.
        label_smoothing: e, the share of pairs that are taken to be the wrong way round, within [0, 0.5).

    Returns:
        float (P,), each log 2 where policy and reference are the same.

    Raises:
        ValueError: the tensors are not both (P,).
    """
    require_flat(chosen=chosen, rejected=rejected)
    margin = beta * (chosen - rejected)
    return -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def ipo_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Identity preference optimisation: the log-ratios of a pair are to differ by 1 / (2 beta), and by no more.

        L_i = (h_c - h_r - 1 / (2 beta))^2

    Azar et al. 2023, arXiv 2310.12036, equation 17, where beta is called tau. As there the log-ratios are sums: no
    length divides them.

    Arguments and errors as in `dpo_loss`; float (P,).
    """
    require_flat(chosen=chosen, rejected=rejected)
    return (chosen - rejected - 1 / (2 * beta)).square()


def kto_reference_point(mismatched: Tensor) -> Tensor:
    """What the log-ratios of a batch are compared with: the mean of those of mismatched pairs, and not below 0.

        z0 = max(0, mean_i h(x_i, y_j)),    j another row than i

    Ethayarajh et al. 2024, arXiv 2402.01306, section 4.1: an estimate of KL(pi, reference).

    Args:
        mismatched: float (N,), log-ratios of prompts with the completions of other rows, of the global batch.

    Returns:
        0-d tensor, detached: no gradient flows through it.

    Raises:
        ValueError: mismatched is not (N,) with N > 0.
    """
    require_flat(mismatched=mismatched)
    require_nonempty(mismatched=mismatched)
    return mismatched.detach().mean().clamp(min=0)


def kto_loss(
    log_ratios: Tensor,
    desirable: Tensor,
    reference_point: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Kahneman-Tversky optimisation: good completions above a point, bad ones below it, each with falling returns.

        L_i = w_D (1 - sigma(beta (h_i - z0)))    where the completion is desirable
        L_i = w_U (1 - sigma(beta (z0 - h_i)))    elsewhere

    Ethayarajh et al. 2024, arXiv 2402.01306, equation 8.

    Args:
        log_ratios: float (N,), h; the gradient flows through these.
        desirable: bool (N,).
        reference_point: 0-d, z0 of `kto_reference_point`.
        beta: how fast returns fall, > 0.
        desirable_weight, undesirable_weight: w_D and w_U, > 0.

    Returns:
        float (N,).

    Raises:
        ValueError: log_ratios and desirable are not both (N,), or desirable is not boolean.
    """
    require_flat(log_ratios=log_ratios, desirable=desirable)
    require_mask(desirable=desirable)
    gain = beta * (log_ratios - reference_point)
    return torch.where(desirable, desirable_weight * (1 - gain.sigmoid()), undesirable_weight * (1 - (-gain).sigmoid()))
