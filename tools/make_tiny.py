"""Make the quickstart's input from a seed: a half-trained policy, a reward model and prompts of a checkable task.

    python -m tools.make_tiny OUT [--seed 0]

OUT/policy          LlamaForCausalLM, trained on two-digit addition until about 40% of unseen prompts are right
OUT/reward          LlamaForSequenceClassification; its score at the last token says how right a response is
OUT/train.jsonl     {"prompt": "47+85=", "answer": "132"} a line
OUT/heldout.jsonl   prompts that no training here has seen, nor their mirror 85+47=
OUT/report.json     accuracies, sizes, seconds, seed

Three trainings: the policy, stopped early; a copy of it trained on until it can add; that copy's backbone under a
score head, trained to prefer right responses to wrong ones, those of the policy itself among them.
Nothing is downloaded. The directory appears at the end, whole, or not at all.
"""

import argparse
import copy
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from tools.tiny_task import (
    SPECIAL_PIECES,
    Problem,
    Response,
    Split,
    encode_prompts,
    encode_responses,
    is_right,
    is_wrong,
    split_problems,
    write_prompts,
    write_tokenizer,
    wrong_response,
)

IGNORED = -100  # label of a position that carries no loss
NEGATIVES = 5  # wrong responses shown beside each right one


@dataclass(frozen=True)
class Settings:
    """Sizes and targets. The tests make a smaller one."""

    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 2
    num_heads: int = 4  # of 32 elements each, the least that vLLM takes
    num_key_value_heads: int = 2
    batch_size: int = 128
    learning_rate: float = 3e-3
    max_policy_steps: int = 1200
    stop_accuracy: float = 0.38
    accuracy_range: tuple[float, float] = (0.2, 0.6)
    teacher_steps: int = 250
    reward_batch_size: int = 48
    reward_learning_rate: float = 1e-3
    reward_steps: int = 300
    least_pair_accuracy: float = 0.97
    num_policy_samples: int = 4096
    max_response_tokens: int = 8
    num_validation: int = 512
    num_heldout: int = 256


class TargetMissed(RuntimeError):
    """A trained model is not what the quickstart needs."""


def say(line: str) -> None:
    print(line, flush=True)


# Models and batches.


def llama_config(settings: Settings, vocab_size: int, **extra: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_key_value_heads,
        head_dim=settings.hidden_size // settings.num_heads,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        initializer_range=0.04,  # 0.02 is for widths in the thousands; here it doubles the steps to the first right sum
        tie_word_embeddings=False,
        use_cache=False,
        **{f"{name}_token_id": index for name, index in SPECIAL_PIECES.items() if name != "unk"},
        **extra,
    )


def padded(rows: list[list[int]], fill: int) -> Tensor:
    """(rows, longest): filled on the right, where a causal model's real positions never look."""
    longest = max(map(len, rows))
    return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])


def answered_batch(tokenizer: PreTrainedTokenizerBase, problems: list[Problem]) -> tuple[Tensor, Tensor]:
    """Prompts with their right responses: ids and labels, both (problems, longest); a prompt carries no loss."""
    prompts = encode_prompts(tokenizer, [problem.prompt for problem in problems])
    answers = encode_responses(tokenizer, [Response(problem.answer) for problem in problems])
    ids = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    labels = [[IGNORED] * len(prompt) + answer for prompt, answer in zip(prompts, answers, strict=True)]
    return padded(ids, SPECIAL_PIECES["pad"]), padded(labels, IGNORED)


def epochs(items: list, batch_size: int, source: random.Random) -> Iterator[list]:
    """Batches without end; each item once an epoch, the remainder of an epoch dropped."""
    while True:
        order = source.sample(items, len(items))
        for start in range(0, len(order) - batch_size + 1, batch_size):
            yield order[start : start + batch_size]


def make_optimizer(model: PreTrainedModel, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)


def descend(model: PreTrainedModel, optimizer: torch.optim.Optimizer, loss: Tensor, *, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


# Generation and accuracy.


def pick_greedy(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def pick_sampled(generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    """Temperature 1."""
    return lambda logits: torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)


@torch.no_grad()
def generate(
    model: LlamaForCausalLM, prompts: list[list[int]], pick: Callable[[Tensor], Tensor], *, max_tokens: int
) -> list[list[int]]:
    """Response ids, with the end token where one was reached. Rows grow in place in one right-padded buffer."""
    ids = padded([prompt + [SPECIAL_PIECES["pad"]] * max_tokens for prompt in prompts], SPECIAL_PIECES["pad"])
    starts = torch.tensor([len(prompt) for prompt in prompts])
    lengths, rows = starts.clone(), torch.arange(len(prompts))
    running = torch.ones(len(prompts), dtype=torch.bool)
    for _ in range(max_tokens):
        logits = model(input_ids=ids[:, : int(lengths.max())]).logits[rows, lengths - 1]  # (rows, vocab)
        chosen = pick(logits)
        ids[rows[running], lengths[running]] = chosen[running]
        lengths += running
        running &= chosen != SPECIAL_PIECES["eos"]
    return [ids[row, starts[row] : lengths[row]].tolist() for row in range(len(prompts))]


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> Response:
    ended = bool(ids) and ids[-1] == tokenizer.eos_token_id
    return Response(tokenizer.decode(ids, skip_special_tokens=True), ended)


def respond(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    *,
    pick: Callable[[Tensor], Tensor],
    max_tokens: int,
) -> list[Response]:
    prompts = encode_prompts(tokenizer, [problem.prompt for problem in problems])
    return [decode(tokenizer, ids) for ids in generate(model, prompts, pick, max_tokens=max_tokens)]


def share_right(responses: list[Response], problems: list[Problem]) -> float:
    right = [is_right(response.text, problem.answer) for response, problem in zip(responses, problems, strict=True)]
    return sum(right) / len(right)


@torch.no_grad()
def forced_accuracy(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> float:
    """Greedy exact accuracy in one forward: greedy decoding is right if and only if every forced choice is."""
    choices = model(input_ids=ids).logits[:, :-1].argmax(-1)
    agrees = (choices == labels[:, 1:]) | (labels[:, 1:] == IGNORED)
    return agrees.all(1).float().mean().item()


# The policy.


def language_loss(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1]  # (batch, length - 1, vocab)
    return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def train_policy(
    settings: Settings, tokenizer: PreTrainedTokenizerBase, split: Split, source: random.Random
) -> LlamaForCausalLM:
    """Supervised training, stopped at the first evaluation that reaches `stop_accuracy` on the validation problems."""
    model = LlamaForCausalLM(llama_config(settings, len(tokenizer)))
    optimizer = make_optimizer(model, settings.learning_rate)
    validation = answered_batch(tokenizer, split.validation)
    batches = epochs(split.train, settings.batch_size, source)
    for step in range(1, settings.max_policy_steps + 1):
        loss = language_loss(model, *answered_batch(tokenizer, next(batches)))
        descend(model, optimizer, loss, learning_rate=settings.learning_rate * min(1.0, step / 40))
        if step % 5 == 0:
            accuracy = forced_accuracy(model, *validation)
            if step % 25 == 0 or accuracy >= settings.stop_accuracy:
                say(f"policy: step {step}, loss {loss.item():.3f}, validation accuracy {accuracy:.3f}")
            if accuracy >= settings.stop_accuracy:
                return model
    raise TargetMissed(
        f"policy: validation accuracy {accuracy:.3f} after {step} steps is under {settings.stop_accuracy}"
    )


def train_teacher(
    policy: LlamaForCausalLM,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: Split,
    source: random.Random,
) -> LlamaForCausalLM:
    """A copy of the policy trained on until it adds well: a reward model can only judge what it could nearly do."""
    model = copy.deepcopy(policy)
    optimizer = make_optimizer(model, settings.learning_rate)
    validation = answered_batch(tokenizer, split.validation)
    batches = epochs(split.train, settings.batch_size, source)
    for step in range(1, settings.teacher_steps + 1):
        loss = language_loss(model, *answered_batch(tokenizer, next(batches)))
        remaining = 1 - step / (settings.teacher_steps + 1)
        descend(model, optimizer, loss, learning_rate=settings.learning_rate * remaining)
        if step % 25 == 0:
            accuracy = forced_accuracy(model, *validation)
            say(f"reward backbone: step {step}, loss {loss.item():.3f}, validation accuracy {accuracy:.3f}")
    return model


# The reward model.


def policy_mistakes(
    policy: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    *,
    generator: torch.Generator,
    max_tokens: int,
) -> dict[Problem, list[Response]]:
    """What the policy itself gets wrong at temperature 1, by problem."""
    responses = respond(policy, tokenizer, problems, pick=pick_sampled(generator), max_tokens=max_tokens)
    mistakes: dict[Problem, list[Response]] = {}
    for problem, response in zip(problems, responses, strict=True):
        if is_wrong(response, problem.answer):
            mistakes.setdefault(problem, []).append(response)
    return mistakes


def contrast(
    problem: Problem, mistakes: dict[Problem, list[Response]], *, num_wrong: int, source: random.Random
) -> list[Response]:
    """The right response, then wrong ones: one of the policy's own where there is one, the others made up."""
    own = source.sample(mistakes.get(problem, []), 1 if problem in mistakes else 0)
    return [Response(problem.answer), *own, *(wrong_response(source, problem.answer) for _ in range(num_wrong - len(own)))]


def score(
    model: LlamaForSequenceClassification,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    *,
    groups: list[list[Response]],
) -> Tensor:
    """(problems, responses of a problem): the score at the last token of prompt + response."""
    prompts = encode_prompts(tokenizer, [p.prompt for p, group in zip(problems, groups, strict=True) for _ in group])
    responses = encode_responses(tokenizer, [response for group in groups for response in group])
    ids = padded([prompt + ids for prompt, ids in zip(prompts, responses, strict=True)], SPECIAL_PIECES["pad"])
    return model(input_ids=ids).logits.view(len(problems), -1)


def preference_loss(scores: Tensor) -> Tensor:
    """Bradley-Terry, -log sigmoid(right - wrong), over every right and every wrong response of the batch.

    Pairs of one prompt leave the score of a prompt free up to a constant, which a policy cannot influence but which
    blurs its advantages; pairs across prompts remove it. The small square keeps the scores centred and bounded.
    """
    right, wrong = scores[:, 0], scores[:, 1:].flatten()
    preference = softplus(wrong[None, :] - right[:, None]).mean()
    return preference + 0.01 * ((right.mean() + wrong.mean()) ** 2 + scores.square().mean())


@torch.no_grad()
def pair_accuracy(
    model: LlamaForSequenceClassification,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    *,
    groups: list[list[Response]],
) -> float:
    """The share of (right, wrong) pairs of one prompt that are ordered rightly."""
    scores = score(model, tokenizer, problems, groups=groups)
    return (scores[:, :1] > scores[:, 1:]).float().mean().item()


def train_reward(
    teacher: LlamaForCausalLM,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    mistakes: dict[Problem, list[Response]],
    split: Split,
    source: random.Random,
) -> LlamaForSequenceClassification:
    model = LlamaForSequenceClassification(llama_config(settings, len(tokenizer), num_labels=1))
    model.model.load_state_dict(teacher.model.state_dict())
    optimizer = make_optimizer(model, settings.reward_learning_rate)
    judged = [contrast(p, mistakes, num_wrong=NEGATIVES, source=source) for p in split.validation]
    batches = epochs(split.train, settings.reward_batch_size, source)
    for step in range(1, settings.reward_steps + 1):
        problems = next(batches)
        groups = [contrast(problem, mistakes, num_wrong=NEGATIVES, source=source) for problem in problems]
        loss = preference_loss(score(model, tokenizer, problems, groups=groups))
        pace = min(step / 20, 1 - step / (settings.reward_steps + 1))
        descend(model, optimizer, loss, learning_rate=settings.reward_learning_rate * min(1.0, pace))
        if step % 25 == 0:
            accuracy = pair_accuracy(model, tokenizer, split.validation, groups=judged)
            say(f"reward model: step {step}, loss {loss.item():.3f}, validation pair accuracy {accuracy:.4f}")
    return model


# The whole.


def save(model: PreTrainedModel, directory: Path, tokenizer_files: Path) -> None:
    model.save_pretrained(directory)
    for file in sorted(tokenizer_files.iterdir()):
        shutil.copyfile(file, directory / file.name)


def require(name: str, value: float, low: float, *, high: float = 1.0) -> None:
    if not low <= value <= high:
        raise TargetMissed(f"{name} is {value:.3f}, not within {low:.2f} to {high:.2f}; try another --seed")


def make(directory: Path, settings: Settings, seed: int) -> dict[str, object]:
    """Fill the empty `directory`. Everything random follows from `seed`."""
    started = time.perf_counter()
    torch.manual_seed(seed)  # the initial weights, which transformers draws from the global generator
    generator, source = torch.Generator().manual_seed(seed), random.Random(seed)
    split = split_problems(source, num_validation=settings.num_validation, num_heldout=settings.num_heldout)
    with tempfile.TemporaryDirectory() as scratch:
        write_tokenizer(Path(scratch), source)
        tokenizer = AutoTokenizer.from_pretrained(scratch)
        policy = train_policy(settings, tokenizer, split, source)
        policy_seconds = time.perf_counter() - started
        teacher = train_teacher(policy, settings, tokenizer, split=split, source=source)
        sampled = source.sample(split.train, min(len(split.train), settings.num_policy_samples)) + split.validation
        mistakes = policy_mistakes(
            policy, tokenizer, sampled, generator=generator, max_tokens=settings.max_response_tokens
        )
        reward = train_reward(teacher, settings, tokenizer, mistakes=mistakes, split=split, source=source)
        save(policy, directory / "policy", Path(scratch))
        save(reward, directory / "reward", Path(scratch))
    write_prompts(directory / "train.jsonl", split.train)
    write_prompts(directory / "heldout.jsonl", split.heldout)
    report = {"seed": seed, "seconds_policy": round(policy_seconds, 1)}
    (directory / "report.json").write_text(json.dumps(report))
    print(report, time.perf_counter() - started)
    return report


if __name__ == "__main__":
    torch.set_num_threads(1)
    make(Path(sys.argv[1]), Settings(), int(sys.argv[2]))
