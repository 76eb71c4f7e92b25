"""What the trainings of `make_tiny` share (settings, batches, generation) and the two supervised ones."""

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from tools.tiny_task import SPECIAL_PIECES, Problem, Response, Split, is_right

Item = TypeVar("Item")
IGNORED = -100  # label of a position that carries no loss


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
    max_policy_steps: int = 1500
    stop_accuracy: float = 0.36
    accuracy_range: tuple[float, float] = (0.2, 0.6)
    teacher_steps: int = 200
    reward_layers: int = 4
    reward_batch_size: int = 48
    reward_learning_rate: float = 2e-3
    inherited_learning_rate: float = 6e-4  # lower, or the layers that can add forget it before they are used
    max_reward_steps: int = 700
    reward_decay_steps: int = 75
    least_pair_accuracy: float = 0.97
    num_policy_samples: int = 3072
    max_response_tokens: int = 8
    num_validation: int = 512
    num_heldout: int = 256


class TargetMissed(RuntimeError):
    """A trained model is not what the quickstart needs."""


def say(line: str) -> None:
    print(line, flush=True)


def progress(name: str, step: int, loss: Tensor, *, accuracy: float) -> None:
    say(f"{name}: step {step}, loss {loss.item():.3f}, validation accuracy {accuracy:.3f}")


def llama_config(
    settings: Settings,
    vocab_size: int,
    num_layers: int,
    *,
    initializer_range: float,
) -> LlamaConfig:
    """`initializer_range`: the usual 0.02 is for wider models and takes twice the steps here."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_key_value_heads,
        head_dim=settings.hidden_size // settings.num_heads,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        initializer_range=initializer_range,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL_PIECES["pad"],
        bos_token_id=SPECIAL_PIECES["bos"],
        eos_token_id=SPECIAL_PIECES["eos"],
    )
    config.num_labels = 1  # of the reward model
    return config


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> list[list[int]]:
    return tokenizer(prompts)["input_ids"] if prompts else []


def encode_responses(tokenizer: PreTrainedTokenizerBase, responses: list[Response]) -> list[list[int]]:
    texts = tokenizer([response.text for response in responses], add_special_tokens=False)["input_ids"]
    end = [tokenizer.eos_token_id]
    return [ids + end if response.ended else ids for ids, response in zip(texts, responses, strict=True)]


def padded(rows: list[list[int]], fill: int) -> Tensor:
    """(rows, longest): filled on the right, where the real positions of a causal model never look."""
    longest = max(map(len, rows))
    return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])


def answered_batch(tokenizer: PreTrainedTokenizerBase, problems: list[Problem]) -> tuple[Tensor, Tensor]:
    """Prompts with right responses: ids and labels, both (problems, longest); a prompt carries no loss."""
    prompts = encode_prompts(tokenizer, [problem.prompt for problem in problems])
    answers = encode_responses(tokenizer, [Response(problem.answer) for problem in problems])
    ids = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    labels = [[IGNORED] * len(prompt) + answer for prompt, answer in zip(prompts, answers, strict=True)]
    return padded(ids, SPECIAL_PIECES["pad"]), padded(labels, IGNORED)


def epochs(items: list[Item], batch_size: int, source: random.Random) -> Iterator[list[Item]]:
    """Batches without end; each item once an epoch, the remainder of an epoch dropped."""
    while True:
        order = source.sample(items, len(items))
        for start in range(0, len(order) - batch_size + 1, batch_size):
            yield order[start : start + batch_size]


class Descent:
    """AdamW over parts of a model, each with its learning rate; a step multiplies these by its pace."""

    def __init__(self, *parts: tuple[list[nn.Parameter], float]) -> None:
        self.parameters = [parameter for parameters, _ in parts for parameter in parameters]
        self.rates = [rate for _, rate in parts]
        groups = [{"params": parameters} for parameters, _ in parts]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01)

    def step(self, loss: Tensor, pace: float) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * pace
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()


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
    """Response ids, with the end token where one was reached. Rows grow in one right-padded buffer."""
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
        if not running.any():
            break
    return [ids[row, starts[row] : lengths[row]].tolist() for row in range(len(prompts))]


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> Response:
    ended = bool(ids) and ids[-1] == tokenizer.eos_token_id
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert isinstance(text, str), f"one sequence was decoded to {type(text).__name__}"
    return Response(text, ended)


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
    both = zip(responses, problems, strict=True)
    return sum(is_right(response.text, problem.answer) for response, problem in both) / len(problems)


@torch.no_grad()
def forced_accuracy(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> float:
    """Greedy exact accuracy in one forward: greedy decoding is right just if every forced choice is."""
    choices = model(input_ids=ids).logits[:, :-1].argmax(-1)
    agrees = (choices == labels[:, 1:]) | (labels[:, 1:] == IGNORED)
    return float(agrees.all(1).float().mean())


# Supervised training.


def language_loss(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1]  # (batch, length - 1, vocab)
    return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def train_policy(
    settings: Settings, tokenizer: PreTrainedTokenizerBase, split: Split, source: random.Random
) -> LlamaForCausalLM:
    """Supervised training until an evaluation on the validation set reaches `stop_accuracy`."""
    config = llama_config(settings, len(tokenizer), settings.num_layers, initializer_range=0.04)
    model = LlamaForCausalLM(config)
    descent = Descent((list(model.parameters()), settings.learning_rate))
    validation = answered_batch(tokenizer, split.validation)
    batches = epochs(split.train, settings.batch_size, source)
    for step in range(1, settings.max_policy_steps + 1):
        loss = language_loss(model, *answered_batch(tokenizer, next(batches)))
        descent.step(loss, min(1.0, step / 40))
        if step % 5 == 0:
            accuracy = forced_accuracy(model, *validation)
            if step % 25 == 0 or accuracy >= settings.stop_accuracy:
                progress("policy", step, loss, accuracy=accuracy)
            if accuracy >= settings.stop_accuracy:
                return model
    raise TargetMissed(f"policy: validation accuracy {accuracy:.3f} after {step} steps; try another --seed")


def train_teacher(
    policy: LlamaForCausalLM,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: Split,
    source: random.Random,
) -> LlamaForCausalLM:
    """A copy of the policy trained on until it adds well: to judge an answer takes nearly as much."""
    model = copy.deepcopy(policy)
    descent = Descent((list(model.parameters()), settings.learning_rate))
    validation = answered_batch(tokenizer, split.validation)
    batches = epochs(split.train, settings.batch_size, source)
    for step in range(1, settings.teacher_steps + 1):
        loss = language_loss(model, *answered_batch(tokenizer, next(batches)))
        descent.step(loss, 1 - step / (settings.teacher_steps + 1))
        if step % 50 == 0:
            progress("reward backbone", step, loss, accuracy=forced_accuracy(model, *validation))
    return model
