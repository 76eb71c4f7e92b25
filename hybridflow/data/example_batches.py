"""Rows of fixed data as packed batches: given completions in the place of a rollout's responses.

    pairs = pair_batch(dataset.examples([4, 0]))    # rows 0 and 1 are the chosen and the rejected completion of row 4

`response_mask` marks the tokens that count. The two completions of a pair answer one prompt, so that a model runs what
they share of it once. There is no engine: the rollout's log-probs are zero, and nothing is cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridflow.batch import PerSequence, RolloutBatch, offsets
from hybridflow.data.examples import Example


@dataclass(frozen=True)
class PairBatch(RolloutBatch):
    """2 P rows: the chosen completion of pair i is row 2 i, the rejected one row 2 i + 1."""

    margins: PerSequence  # of the pair, at both rows


@dataclass(frozen=True)
class LabelledBatch(RolloutBatch):
    desirable: PerSequence  # bool


def given_batch(examples: Sequence[Example]) -> RolloutBatch:
    """A row a sequence; prompt_indices are places in `examples`."""
    return RolloutBatch(**_packed(examples))


def pair_batch(examples: Sequence[Example]) -> PairBatch:
    margins = torch.tensor([example.margin for example in examples], dtype=torch.float32)
    return PairBatch(**_packed(examples), margins=margins.repeat_interleave(2))


def labelled_batch(examples: Sequence[Example]) -> LabelledBatch:
    return LabelledBatch(**_packed(examples), desirable=torch.tensor([example.label for example in examples]))


def mismatched(examples: Sequence[Example], max_length: int) -> list[Example]:
    """Each prompt with the completion of the next row, the last with that of the first; cut at `max_length` tokens."""
    others = [*examples[1:], *examples[:1]]
    return [_with_completion_of(one, other, max_length) for one, other in zip(examples, others, strict=True)]


def _with_completion_of(one: Example, other: Example, max_length: int) -> Example:
    [own], [others], [trained] = one.sequences, other.sequences, other.trained
    [prompt], [others_prompt] = one.prompt_lengths, other.prompt_lengths
    end = others_prompt + max(max_length - prompt, 1)
    return Example(
        sequences=(torch.cat([own[:prompt], others[others_prompt:end]]),),
        trained=(torch.cat([torch.zeros(prompt, dtype=torch.bool), trained[others_prompt:end]]),),
        prompt_lengths=(prompt,),
        label=one.label,
    )


def _packed(examples: Sequence[Example]) -> dict[str, Any]:
    """The fields of a RolloutBatch. The first token of a sequence never counts: nothing predicts it."""
    sequences = [ids for example in examples for ids in example.sequences]
    lengths = torch.tensor([len(ids) for ids in sequences], dtype=torch.int64)
    mask = torch.cat([trained for example in examples for trained in example.trained])
    mask[offsets(lengths)] = False
    prompts = [length for example in examples for length in example.prompt_lengths]
    indices = [i for i, example in enumerate(examples) for _ in example.sequences]
    return {
        "input_ids": torch.cat(sequences),
        "lengths": lengths,
        "prompt_lengths": torch.tensor(prompts, dtype=torch.int64).clamp(min=1),
        "prompt_indices": torch.tensor(indices, dtype=torch.int64),
        "truncated": torch.zeros(len(lengths), dtype=torch.bool),
        "response_mask": mask,
        "rollout_log_probs": torch.zeros(int(lengths.sum())),
    }


def prompt_and_completion(example: Example, sequence: int) -> tuple[Tensor, Tensor]:
    """The tokens of one sequence before the first token that counts, and from there on."""
    ids, length = example.sequences[sequence], example.prompt_lengths[sequence]
    return ids[:length], ids[length:]
