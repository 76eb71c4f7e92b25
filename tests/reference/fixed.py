"""Losses on fixed data in one process with HuggingFace models and plain PyTorch, a sequence at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hybridflow.data.examples import Example


def token_log_probs(model: nn.Module, ids: Tensor) -> Tensor:
    """Of each token but the first, given what precedes it."""
    logits = model(input_ids=ids[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def completion(model: nn.Module, ids: Tensor, counts: Tensor) -> Tensor:
    """log pi of the tokens that count, summed."""
    return token_log_probs(model, ids)[counts[1:]].sum()


def score(model: nn.Module, ids: Tensor) -> Tensor:
    return model.score(model.model(input_ids=ids[None]).last_hidden_state[0, -1])[0]


def sft(policy: nn.Module, rows: Sequence[Example]) -> Tensor:
    every = [token_log_probs(policy, row.sequences[0])[row.trained[0][1:]] for row in rows]
    return -sum(x.sum() for x in every) / sum(len(x) for x in every)


def log_ratio(policy: nn.Module, reference: nn.Module, ids: Tensor, counts: Tensor) -> Tensor:
    with torch.no_grad():
        known = completion(reference, ids, counts)
    return completion(policy, ids, counts) - known


def dpo(
    policy: nn.Module,
    reference: nn.Module,
    rows: Sequence[Example],
    beta: float,
    smoothing: float = 0.0,
    *,
    ipo: bool = False,
) -> tuple[Tensor, list[float]]:
    """The loss, and the implicit rewards' margin of each pair."""
    losses, margins = [], []
    for row in rows:
        good, bad = (
            log_ratio(policy, reference, ids, counts) for ids, counts in zip(row.sequences, row.trained, strict=True)
        )
        h = good - bad
        margins.append(beta * float(h.detach()))
        if ipo:
            losses.append((h - 1 / (2 * beta)) ** 2)
        else:
            right, wrong = torch.sigmoid(beta * h), torch.sigmoid(-beta * h)
            losses.append(-(1 - smoothing) * right.log() - smoothing * wrong.log())
    return sum(losses) / len(rows), margins


def kto(
    policy: nn.Module,
    reference: nn.Module,
    rows: Sequence[Example],
    *,
    beta: float,
    weights: tuple[float, float],
    max_length: int,
) -> tuple[Tensor, float]:
    """The loss, and the point of reference."""
    mismatched = []
    for i, row in enumerate(rows):
        other, prompt = rows[(i + 1) % len(rows)], row.prompt_lengths[0]
        ids = torch.cat([row.sequences[0][:prompt], other.sequences[0][other.prompt_lengths[0] :]])[:max_length]
        counts = torch.zeros(len(ids), dtype=torch.bool)
        counts[prompt:] = other.trained[0][other.prompt_lengths[0] :][: len(ids) - prompt]
        with torch.no_grad():
            mismatched.append(float(log_ratio(policy, reference, ids, counts)))
    point = max(0.0, sum(mismatched) / len(mismatched))
    losses = []
    for row in rows:
        h = log_ratio(policy, reference, row.sequences[0], row.trained[0])
        good, bad = weights
        value = torch.sigmoid(beta * (h - point)) if row.label else torch.sigmoid(beta * (point - h))
        losses.append((good if row.label else bad) * (1 - value))
    return sum(losses) / len(rows), point


def reward_model(model: nn.Module, rows: Sequence[Example]) -> tuple[Tensor, list[float]]:
    """The loss, and by how much the better completion of each pair leads."""
    losses, margins = [], []
    for row in rows:
        good, bad = (score(model, ids) for ids in row.sequences)
        margins.append(float((good - bad).detach()))
        losses.append(-torch.sigmoid(good - bad - row.margin).log())
    return sum(losses) / len(rows), margins
