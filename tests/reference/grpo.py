"""GRPO in one process with HuggingFace models and plain PyTorch: one sequence at a time, written from the equations."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.ppo import Hyperparameters


@dataclass
class Response:
    """One response; what is known of it is per token that the policy wrote."""

    tokens: Tensor
    written: Tensor  # bool, of each token: by the policy, and not by a prompt or a tool
    group: int
    score: float = 0.0
    log_probs: Tensor = None
    ref_log_probs: Tensor = None
    advantage: Tensor = None


def written_log_probs(model: torch.nn.Module, response: Response, temperature: float) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) of the tokens that the policy wrote."""
    logits = model(response.tokens[None]).logits[0] / temperature
    log_p = logits.log_softmax(-1)
    before = response.written.nonzero().squeeze(1) - 1
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p[before, response.tokens[before + 1]], entropy[before]


@torch.no_grad()
def estimate(responses: list[Response], models: dict[str, torch.nn.Module], h: Hyperparameters) -> None:
    """Fill in what is known before the update."""
    for r in responses:
        r.log_probs, _ = written_log_probs(models["policy"], r, h.temperature)
        r.ref_log_probs, _ = written_log_probs(models["reference"], r, h.temperature)
        hidden = models["reward"].model(r.tokens[None]).last_hidden_state[0]
        r.score = models["reward"].score(hidden[-1]).item()
    for r in responses:
        scores = torch.tensor([other.score for other in responses if other.group == r.group], dtype=torch.float64)
        r.advantage = (r.score - scores.mean()) / (scores.std() + 1e-6)


def actor_loss(responses: list[Response], policy: torch.nn.Module, h: Hyperparameters) -> Tensor:
    """Mean over responses of the mean over their tokens of: clipped surrogate, entropy bonus, k3 to the reference."""
    total = torch.zeros(())
    for r in responses:
        log_probs, entropy = written_log_probs(policy, r, h.temperature)
        ratio = (log_probs - r.log_probs).exp()
        surrogate = torch.minimum(ratio * r.advantage, ratio.clamp(1 - h.clip_low, 1 + h.clip_high) * r.advantage)
        log_ratio = r.ref_log_probs - log_probs
        kl = log_ratio.exp() - 1 - log_ratio
        total = total + (-surrogate - h.entropy_coef * entropy + h.kl_coef * kl).mean()
    return (total / len(responses)).float()
