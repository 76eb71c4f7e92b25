"""The reward model of `make_tiny`: Bradley-Terry over right and wrong responses, and two helping losses.

The first layers come from a model that can add, so that the state at each position knows which token should
come next. Whether the token that did come is that one has to be learnt, and the score of the last token alone
teaches it slowly. So two heads on a middle layer, thrown away afterwards, ask at each response position up to
the first wrong token: which token should stand here, and is it the one that does?
"""

import itertools
import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, softplus
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerBase

from tools.tiny_task import (
    SPECIAL_PIECES,
    Problem,
    Response,
    is_wrong,
    wrong_response,
)
from tools.tiny_training import (
    IGNORED,
    Descent,
    Settings,
    encode_prompts,
    encode_responses,
    epochs,
    llama_config,
    padded,
    pick_sampled,
    progress,
    respond,
)

Mistakes = dict[Problem, list[Response]]
HELPED_LAYER = 3  # counted from 1; a later one must be left to gather the verdict at the last token


@dataclass(frozen=True)
class Pairs:
    """n right, then n wrong responses to the same n problems, as (2n, length) and (2n,)."""

    ids: Tensor
    last: Tensor  # position of the last token
    expected: Tensor  # the token that should stand here; IGNORED in a prompt and after the first wrong token
    matches: Tensor  # 1 where it does, else 0; IGNORED likewise


def policy_mistakes(
    policy: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    *,
    generator: torch.Generator,
    max_tokens: int,
) -> Mistakes:
    """What the policy itself gets wrong at temperature 1, by problem."""
    responses = respond(policy, tokenizer, problems, pick=pick_sampled(generator), max_tokens=max_tokens)
    mistakes: Mistakes = {}
    for problem, response in zip(problems, responses, strict=True):
        if is_wrong(response, problem.answer):
            mistakes.setdefault(problem, []).append(response)
    return mistakes


def draw_wrong(problem: Problem, mistakes: Mistakes, source: random.Random) -> Response:
    """The policy's own mistakes and made-up ones in equal shares."""
    if problem in mistakes and source.random() < 0.5:
        return source.choice(mistakes[problem])
    return wrong_response(source, problem.answer)


def _aligned(response: list[int], right: list[int]) -> tuple[list[int], list[int]]:
    """(expected, matches) of one response; beyond the first wrong token nothing is asked."""
    agreeing = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(response, right, strict=False))
    num_agreeing = len(list(agreeing))
    num_asked = min(len(response), len(right), num_agreeing + 1)
    silent = [IGNORED] * (len(response) - num_asked)
    return right[:num_asked] + silent, [int(i < num_agreeing) for i in range(num_asked)] + silent


def make_pairs(tokenizer: PreTrainedTokenizerBase, problems: list[Problem], wrong: list[Response]) -> Pairs:
    prompts = 2 * encode_prompts(tokenizer, [problem.prompt for problem in problems])
    right = encode_responses(tokenizer, [Response(problem.answer) for problem in problems])
    responses = right + encode_responses(tokenizer, wrong)
    asked = [_aligned(response, answer) for response, answer in zip(responses, 2 * right, strict=True)]
    prompts_silent = [[IGNORED] * len(prompt) for prompt in prompts]
    expected = [silent + tokens for silent, (tokens, _) in zip(prompts_silent, asked, strict=True)]
    matches = [silent + verdicts for silent, (_, verdicts) in zip(prompts_silent, asked, strict=True)]
    ids = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    return Pairs(
        ids=padded(ids, SPECIAL_PIECES["pad"]),
        last=torch.tensor([len(row) - 1 for row in ids]),
        expected=padded(expected, IGNORED),
        matches=padded(matches, IGNORED),
    )


def preference_loss(right: Tensor, wrong: Tensor) -> Tensor:
    """Bradley-Terry, -log sigmoid(right - wrong), over every right and every wrong response of the batch.

    Pairs of one prompt leave its scores free up to a constant, which no policy can influence but which blurs
    advantages; pairs across prompts remove it. The small squares keep scores centred and bounded.
    """
    preference = softplus(wrong[None, :] - right[:, None]).mean()  # (right, wrong)
    spread = right.square().mean() + wrong.square().mean() + (right.mean() + wrong.mean()) ** 2
    return preference + 0.01 * spread


class Helpers(nn.Module):
    """The two heads on a middle layer."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size)
        self.expected = nn.Linear(hidden_size, vocab_size)
        self.matches = nn.Linear(hidden_size, 1)

    def loss(self, states: Tensor, pairs: Pairs) -> Tensor:
        asked = pairs.matches != IGNORED
        states = self.norm(states[asked])  # (asked positions, hidden)
        expected = cross_entropy(self.expected(states), pairs.expected[asked])
        verdicts = self.matches(states).squeeze(1)
        return expected + binary_cross_entropy_with_logits(verdicts, pairs.matches[asked].float())


def pair_loss(model: LlamaForSequenceClassification, helpers: Helpers, pairs: Pairs) -> Tensor:
    layers = model.model(input_ids=pairs.ids, output_hidden_states=True)
    rows = torch.arange(len(pairs.ids))
    right, wrong = model.score(layers.last_hidden_state[rows, pairs.last]).squeeze(1).chunk(2)
    return preference_loss(right, wrong) + helpers.loss(layers.hidden_states[HELPED_LAYER], pairs)


@torch.no_grad()
def pair_accuracy(model: LlamaForSequenceClassification, pairs: Pairs) -> float:
    """The share of pairs of one prompt that are ordered rightly, scored as transformers does it."""
    right, wrong = model(input_ids=pairs.ids).logits.squeeze(1).chunk(2)
    return float((right > wrong).float().mean())


def on_top_of(teacher: LlamaForCausalLM, settings: Settings) -> LlamaForSequenceClassification:
    """The teacher's embeddings and layers, further layers above them, and a score head."""
    vocab_size = teacher.config.vocab_size
    config = llama_config(settings, vocab_size, settings.reward_layers, initializer_range=0.08)
    model = LlamaForSequenceClassification(config)
    model.model.load_state_dict(teacher.model.state_dict(), strict=False)
    return model


def split_parameters(
    model: LlamaForSequenceClassification, teacher: LlamaForCausalLM
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Those that start at random and those that come from the teacher."""
    from_teacher = teacher.model.state_dict().keys()
    named = [(name.removeprefix("model."), parameter) for name, parameter in model.named_parameters()]
    fresh = [parameter for name, parameter in named if name not in from_teacher]
    return fresh, [parameter for name, parameter in named if name in from_teacher]


def train_reward(
    teacher: LlamaForCausalLM,
    settings: Settings,
    tokenizer: PreTrainedTokenizerBase,
    *,
    mistakes: Mistakes,
    problems: list[Problem],
    judged: Pairs,
    source: random.Random,
) -> LlamaForSequenceClassification:
    """Full pace until the validation pairs are right, then down to nothing over `reward_decay_steps`."""
    model = on_top_of(teacher, settings)
    helpers = Helpers(settings.hidden_size, teacher.config.vocab_size)
    fresh, inherited = split_parameters(model, teacher)
    descent = Descent(
        ([*fresh, *helpers.parameters()], settings.reward_learning_rate),
        (inherited, settings.inherited_learning_rate),
    )
    batches = epochs(problems, settings.reward_batch_size, source)
    num_left = settings.reward_decay_steps
    decaying = False
    for step in range(1, settings.max_reward_steps + 1):
        batch = next(batches)
        wrong = [draw_wrong(problem, mistakes, source) for problem in batch]
        loss = pair_loss(model, helpers, make_pairs(tokenizer, batch, wrong))
        decaying = decaying or step > settings.max_reward_steps - settings.reward_decay_steps
        num_left -= decaying
        descent.step(loss, min(1.0, step / 20, (num_left + 1) / settings.reward_decay_steps))
        if step % 25 == 0 or num_left == 0:
            accuracy = pair_accuracy(model, judged)
            progress("reward model", step, loss, accuracy=accuracy)
            decaying = decaying or accuracy >= settings.least_pair_accuracy
        if num_left == 0:
            break
    return model
