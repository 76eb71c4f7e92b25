"""What a run has understood of the inputs, in a few lines, before training."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridflow.architecture.spec import read_spec
from hybridflow.config import ExperimentConfig
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.data.end_tokens import EndTokens
from hybridflow.data.examples import Example, ExampleDataset
from hybridflow.data.prompts import PromptDataset
from hybridflow.data.rows import shown
from hybridflow.data.tokenizers import decoded, is_special, load_tokenizer, named_tokens

MOST = 400  # characters of a prompt
MARKS = ("[[", "]]")  # around tokens that are trained
NUM_ROWS = 3
ANSWERS = ("answer", "ground_truth", "solution", "label", "labels", "target", "tests", "final_answer")


def prompt_summary(
    config: ExperimentConfig, prompts: PromptDataset, ends: EndTokens, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """End tokens, the first prompt, the first answers, and where scores are read."""
    order = prompts.order(config.seed, config.data.shuffle)
    first = prompts.draw(order, min(NUM_ROWS, len(prompts))).batch
    ids = first.input_ids[: int(first.lengths[0])].tolist()
    prompt = f"first prompt, {len(ids)} tokens: {shown(decoded(ids, tokenizer), MOST)}"
    lines = [ends.described(tokenizer), prompt if ids else "prompts: the first requests of the agent"]
    answers = [name for name in ANSWERS if name in first.columns] or list(first.columns)
    if answers:
        lines.append(f"column {answers[0]}: {_values(first.columns[answers[0]])}")
    wanted = config.data.prompts_per_iteration
    if len(prompts) < wanted:
        lines.append(
            f"data.train has {len(prompts)} rows, fewer than data.prompts_per_iteration = {wanted}: a batch has some "
            "rows more than once"
        )
    for i, model in enumerate(config.reward.models if config.reward is not None else ()):
        own = load_tokenizer(Path(model.model)) if model.reencode else tokenizer
        anew = "the model's own tokenizer encodes the text, and " if model.reencode else ""
        lines.append(f"reward.models.{i}: {anew}{_read_at(model.model, own)}")
    return lines


def example_summary(config: FixedDataConfig, rows: ExampleDataset, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The first row with what counts, and the token that ends it."""
    some = rows.draw(rows.order(config.seed, config.data.shuffle), min(NUM_ROWS, len(rows))).items
    first = some[0]
    text = marked(first.sequences[0], first.trained[0], tokenizer)
    num_tokens, num_trained = len(first.sequences[0]), int(first.trained[0].sum())
    counts = f"first row, {num_tokens} tokens, {num_trained} of them trained, in {' '.join(MARKS)}"
    lines = [f"{counts}: {shown(text, MOST)}"]
    taught = taught_end(first, tokenizer)
    if taught is None:
        lines.append("no special token ends the tokens that are trained on: the model does not learn to stop")
    else:
        lines.append(f"end token that is taught: {named_tokens([taught], tokenizer)}")
    if all(example.repeats_prompt for example in some):
        then = "chosen" if len(first.sequences) == 2 else "completion"
        lines.append(
            f"{then} begins with the prompt itself, and the model reads the prompt twice. Leave the prompt out of one "
            "of the two columns"
        )
    if config.reward_model is not None:
        lines.append(f"reward_model: {_read_at(config.reward_model.model, tokenizer)}")
    return lines


def taught_end(example: Example, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The last token that counts, where it is one that ends a response."""
    counting = example.sequences[0][example.trained[0]]
    last = int(counting[-1])
    return last if is_special(last, tokenizer) else None


def marked(ids: Tensor, trained: Tensor, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text, with marks around each run of tokens that count."""
    cuts = [0, *(i for i in range(1, len(ids)) if trained[i] != trained[i - 1]), len(ids)]
    texts = []
    for start, end in itertools.pairwise(cuts):
        text = decoded(ids[start:end].tolist(), tokenizer)
        texts.append(f"{MARKS[0]}{text}{MARKS[1]}" if trained[start] else text)
    return "".join(texts)


def _values(values: Sequence[Any]) -> str:
    return ", ".join(shown(value) for value in values)


def _read_at(model: str, tokenizer: PreTrainedTokenizerBase) -> str:
    pad = read_spec(model).pad_token_id
    if pad is None:
        return "the score is read at the last token of a response"
    return f"the score is read at the last token of a response that is not {named_tokens([pad], tokenizer)}"
