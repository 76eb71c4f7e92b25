"""Algorithms in one process with HuggingFace models and plain PyTorch: one response at a time, from the equations."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.grpo import written_log_probs


@dataclass
class Response:
    """One response; what is known of it is per token that the policy wrote."""

    tokens: Tensor
    written: Tensor  # bool, of each token: by the policy, and not by a prompt or a tool
    prompt_length: int
    group: int
    rollout_log_probs: Tensor
    truncated: bool = False
    temperature: float = 1.0
    score: float = 0.0
    log_probs: Tensor = None
    ref_log_probs: Tensor = None
    values: Tensor = None
    advantages: Tensor = None
    returns: Tensor = None

    @property
    def length(self) -> int:
        return int(self.written.sum())


@dataclass(frozen=True)
class Recipe:
    """What is minimised."""

    kind: str = "clip"
    mean: str = "token_mean"
    low: float = 0.2
    high: float = 0.2
    taus: tuple[float, float] = (1.0, 1.05)
    entropy_coef: float = 0.0
    kl: str = "none"  # in the loss: k2, k3, k3+
    kl_coef: float = 0.0
    old: str = "trainer"
    weights: tuple | None = None  # (kind, bounds)
    max_response_length: int = 0
    masks_truncated: bool = False
    positive_nll: float = 0.0


def even_share(tokens: Tensor) -> float:
    return sum(int(token) % 2 == 0 for token in tokens) / len(tokens)


@torch.no_grad()
def estimate(responses: list[Response], models: dict[str, torch.nn.Module]) -> None:
    """Fill in scores, log-probs and values."""
    for r in responses:
        r.score = even_share(r.tokens[r.prompt_length :])
        r.log_probs, _ = written_log_probs(models["policy"], r, r.temperature)
        r.ref_log_probs, _ = written_log_probs(models["reference"], r, r.temperature)
        hidden = models["critic"].model(r.tokens[None]).last_hidden_state[0]
        r.values = models["critic"].score(hidden)[r.written.nonzero().squeeze(1) - 1, 0]


# ------------------------------------------------------------------------------------------------ advantages


def of_group(r: Response, responses: list[Response], penalty: float = 0.0) -> list[float]:
    """The scores of all that answer the prompt of r, less the KL of each whole response."""
    return [float(x) for x in (judged(o, penalty) for o in responses if o.group == r.group)]


def judged(r: Response, penalty: float) -> float:
    return r.score - penalty * float((r.log_probs - r.ref_log_probs).double().sum())


def relative(responses: list[Response], of: Callable[[Response], float]) -> None:
    for r in responses:
        r.advantages = torch.full((r.length,), of(r), dtype=torch.float64)


def mean_of(values: list[float]) -> float:
    return sum(values) / len(values)


def std_of(values: list[float]) -> float:
    return (sum((x - mean_of(values)) ** 2 for x in values) / (len(values) - 1)) ** 0.5


def grpo(responses: list[Response]) -> None:
    relative(
        responses,
        lambda r: (r.score - mean_of(of_group(r, responses))) / (std_of(of_group(r, responses)) + 1e-6),
    )


def batch_std(responses: list[Response]) -> None:
    spread = std_of([r.score for r in responses])
    relative(responses, lambda r: (r.score - mean_of(of_group(r, responses))) / (spread + 1e-6))


def dr_grpo(responses: list[Response]) -> None:
    relative(responses, lambda r: r.score - mean_of(of_group(r, responses)))


def rloo(responses: list[Response], kl_coef: float) -> None:
    def advantage(r: Response) -> float:
        others = [judged(o, kl_coef) for o in responses if o.group == r.group and o is not r]
        return judged(r, kl_coef) - mean_of(others)

    relative(responses, advantage)


def opo(responses: list[Response]) -> None:
    def advantage(r: Response) -> float:
        group = [o for o in responses if o.group == r.group]
        return r.score - sum(o.length * o.score for o in group) / sum(o.length for o in group)

    relative(responses, advantage)


def maxrl(responses: list[Response]) -> None:
    relative(responses, lambda r: (r.score - mean_of(of_group(r, responses))) / mean_of(of_group(r, responses)))


def rewards_of(r: Response, kl_coef: float) -> list[float]:
    rewards = (-kl_coef * (r.log_probs - r.ref_log_probs).double()).tolist()
    rewards[-1] += r.score
    return rewards


def to_go(rewards: list[float], gamma: float) -> Tensor:
    sums = [sum(gamma**k * x for k, x in enumerate(rewards[t:])) for t in range(len(rewards))]
    return torch.tensor(sums, dtype=torch.float64)


def remax(responses: list[Response], kl_coef: float, greedy: dict[int, float]) -> None:
    for r in responses:
        r.advantages = to_go(rewards_of(r, kl_coef), 1.0) - greedy[r.group]


def whitened(responses: list[Response]) -> None:
    every = torch.cat([r.advantages for r in responses])
    for r in responses:
        r.advantages = (r.advantages - every.mean()) / every.std()


def reinforce(responses: list[Response], kl_coef: float, gamma: float) -> None:
    for r in responses:
        r.advantages = to_go(rewards_of(r, kl_coef), gamma)
    whitened(responses)


def reinforce_group(responses: list[Response]) -> None:
    dr_grpo(responses)
    whitened(responses)


def distill(responses: list[Response], gamma: float) -> None:
    for r in responses:
        r.advantages = to_go((r.ref_log_probs - r.log_probs).double().tolist(), gamma)


def gae(rewards: list[float], values: list[float], gamma: float, gae_lambda: float) -> Tensor:
    deltas = [r + gamma * (values[t + 1] if t + 1 < len(values) else 0.0) - values[t] for t, r in enumerate(rewards)]
    return to_go(deltas, gamma * gae_lambda)


def vapo(responses: list[Response], kl_coef: float, gamma: float, alpha: float, value_lambda: float) -> None:
    for r in responses:
        rewards, values = rewards_of(r, kl_coef), r.values.double().tolist()
        r.advantages = gae(rewards, values, gamma, min(max(1 - 1 / (alpha * r.length), 0.0), 1.0))
        r.returns = gae(rewards, values, gamma, value_lambda) + r.values
    whitened(responses)


# ------------------------------------------------------------------------------------------------ losses


def policy_terms(r: Response, log_probs: Tensor, recipe: Recipe) -> Tensor:
    old = r.log_probs if recipe.old == "trainer" else r.rollout_log_probs
    ratio, a, low, high = (log_probs - old).exp(), r.advantages.float(), 1 - recipe.low, 1 + recipe.high
    if recipe.kind == "gspo":
        ratio = (log_probs - old).mean().exp()
    if recipe.kind in ("clip", "gspo"):
        return -torch.minimum(ratio * a, ratio.clamp(low, high) * a)
    if recipe.kind == "cispo":
        return -ratio.detach().clamp(low, high) * a * log_probs
    if recipe.kind == "sapo":
        tau = torch.where(a > 0, *recipe.taus)
        return -a * 4 / tau / (1 + (-tau * (ratio - 1)).exp())
    assert recipe.kind == "reinforce"
    return -a * log_probs


def weights_of(r: Response, weights: tuple) -> Tensor:
    kind, bounds = weights
    w = (r.log_probs - r.rollout_log_probs).exp()
    if kind == "token":
        return w.clamp(max=bounds[0])
    if kind == "sequence":
        return w.prod().clamp(max=bounds[0])
    if kind == "geometric":
        return torch.tensor(float(bounds[0] <= w.prod() ** (1 / len(w)) <= bounds[1]))
    return torch.where((w >= bounds[0]) & (w <= bounds[1]), w, 0.0)


def kl_terms(r: Response, log_probs: Tensor, kind: str) -> Tensor:
    d = log_probs - r.ref_log_probs
    k2, k3 = d**2 / 2, (-d).exp() - 1 + d
    return {"k2": k2, "k3": k3, "k3+": k2 + (k3 - k2).detach()}[kind]


def actor_loss(responses: list[Response], policy: torch.nn.Module, recipe: Recipe) -> tuple[Tensor, float]:
    """The loss, and the largest size of a token's: where advantages add up to zero the loss is a small difference."""
    terms = []
    responses = [r for r in responses if not (recipe.masks_truncated and r.truncated)]
    for r in responses:
        log_probs, entropy = written_log_probs(policy, r, r.temperature)
        each = policy_terms(r, log_probs, recipe)
        if recipe.weights is not None:
            each = each * weights_of(r, recipe.weights)
        each = each - recipe.entropy_coef * entropy
        if recipe.kl != "none":
            each = each + recipe.kl_coef * kl_terms(r, log_probs, recipe.kl)
        terms.append(each)
    loss = mean_over(terms, responses, recipe)
    if recipe.positive_nll:
        right = [written_log_probs(policy, r, r.temperature)[0] for r in responses if r.score > 0]
        loss = loss - recipe.positive_nll * torch.cat(right).mean()
    return loss, max(float(x.detach().abs().max()) for x in terms)


def mean_over(terms: list[Tensor], responses: list[Response], recipe: Recipe) -> Tensor:
    total = sum(each.sum() for each in terms)
    num_tokens, num_responses = sum(len(each) for each in terms), len(terms)
    if recipe.mean == "token_mean":
        return total / num_tokens
    if recipe.mean == "sequence_token_mean":
        return sum(each.mean() for each in terms) / num_responses
    if recipe.mean == "sequence_sum_mean":
        return total / num_responses
    if recipe.mean == "constant":
        return total / (num_responses * recipe.max_response_length)
    groups = sorted({r.group for r in responses})
    of_groups = [torch.cat([x for x, r in zip(terms, responses, strict=True) if r.group == g]) for g in groups]
    return sum(each.mean() for each in of_groups) / len(groups)
