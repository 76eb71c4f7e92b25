"""The same PPO in one process with HuggingFace models and plain PyTorch: one sequence at a time, nothing packed.

Written from the equations and not from hybridflow/algorithms, so that the two can be compared.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Episode:
    """One prompt with its response; everything below is per response token."""

    tokens: Tensor
    prompt_length: int
    log_probs: Tensor = None
    ref_log_probs: Tensor = None
    values: Tensor = None
    score: float = 0.0
    rewards: Tensor = None
    advantages: Tensor = None
    returns: Tensor = None


@dataclass(frozen=True)
class Hyperparameters:
    gamma: float = 0.97
    gae_lambda: float = 0.9
    kl_coef: float = 0.1
    clip_low: float = 0.2
    clip_high: float = 0.3
    value_clip: float = 0.2
    entropy_coef: float = 0.01
    temperature: float = 1.0
    extra: dict = field(default_factory=dict)


def response_log_probs(model: torch.nn.Module, episode: Episode, temperature: float) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) of the response tokens."""
    logits = model(episode.tokens[None]).logits[0] / temperature
    distribution = torch.distributions.Categorical(logits=logits[episode.prompt_length - 1 : -1])
    return distribution.log_prob(episode.tokens[episode.prompt_length :]), distribution.entropy()


def response_values(model: torch.nn.Module, episode: Episode) -> Tensor:
    """Values of the states before the response tokens."""
    hidden = model.model(episode.tokens[None]).last_hidden_state[0]
    return model.score(hidden)[episode.prompt_length - 1 : -1, 0]


def sequence_score(model: torch.nn.Module, episode: Episode) -> float:
    hidden = model.model(episode.tokens[None]).last_hidden_state[0]
    return model.score(hidden[-1]).item()


@torch.no_grad()
def estimate(episodes: list[Episode], models: dict[str, torch.nn.Module], h: Hyperparameters) -> None:
    """Fill in what is known before the update."""
    for e in episodes:
        e.log_probs, _ = response_log_probs(models["policy"], e, h.temperature)
        e.ref_log_probs, _ = response_log_probs(models["reference"], e, h.temperature)
        e.values = response_values(models["critic"], e)
        e.score = sequence_score(models["reward"], e)
        e.rewards = -h.kl_coef * (e.log_probs - e.ref_log_probs)
        e.rewards[-1] += e.score
        length = len(e.rewards)
        next_values = torch.cat([e.values[1:], torch.zeros(1)])
        deltas = e.rewards + h.gamma * next_values - e.values
        discounts = (h.gamma * h.gae_lambda) ** torch.arange(length, dtype=torch.float64)
        e.advantages = torch.stack([(deltas[t:].double() * discounts[: length - t]).sum() for t in range(length)])
        e.returns = (e.advantages + e.values).float()
    whole = torch.cat([e.advantages for e in episodes])
    for e in episodes:
        e.advantages = ((e.advantages - whole.mean()) / whole.std()).float()


def actor_loss(episodes: list[Episode], policy: torch.nn.Module, h: Hyperparameters) -> Tensor:
    """Mean over all response tokens of the clipped surrogate, less the entropy bonus."""
    total, count = torch.zeros(()), 0
    for e in episodes:
        log_probs, entropy = response_log_probs(policy, e, h.temperature)
        ratio = (log_probs - e.log_probs).exp()
        surrogate = torch.minimum(ratio * e.advantages, ratio.clamp(1 - h.clip_low, 1 + h.clip_high) * e.advantages)
        total = total - (surrogate + h.entropy_coef * entropy).sum()
        count += len(log_probs)
    return total / count


def critic_loss(episodes: list[Episode], critic: torch.nn.Module, h: Hyperparameters) -> Tensor:
    total, count = torch.zeros(()), 0
    for e in episodes:
        values = response_values(critic, e)
        clipped = e.values + (values - e.values).clamp(-h.value_clip, h.value_clip)
        total = total + 0.5 * torch.maximum((values - e.returns) ** 2, (clipped - e.returns) ** 2).sum()
        count += len(values)
    return total / count
