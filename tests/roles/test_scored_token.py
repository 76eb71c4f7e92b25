"""A conversation has one score: where it is trained and judged, where PPO reads it, and in transformers; as a module,
on two ranks.

torchrun --nproc-per-node 2 -m tests.roles.test_scored_token ROOT
"""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from hybridflow.batch import RolloutBatch
from hybridflow.config import OptimizerConfig, TrainedRoleConfig
from hybridflow.config.roles import RewardModelConfig
from hybridflow.data.example_batches import pair_batch
from hybridflow.data.examples import load_examples
from hybridflow.data.prompts import load_prompts
from hybridflow.data.tokenizers import load_tokenizer
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange, PartialTensor
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.roles.base import RunContext
from hybridflow.roles.values import RewardModel, TrainedRewardModel
from tests.data.test_chat import CHATML, LLAMA3, message, tokenizer
from tests.launch import run_ranks
from tests.placing import place_model
from tests.tiny_models import make_checkpoints

# template, the token that ends a turn, the pad token
CASES = {
    "a line break after the end": (CHATML, "<|im_end|>", "<|start_header_id|>"),
    "the end pads": (CHATML, "<|im_end|>", "<|im_end|>"),
    "nothing after the end": (LLAMA3, "<|eot_id|>", "<|start_header_id|>"),
    "no pad token": (CHATML, "<|im_end|>", None),
}
PAIRS = [("one", "two", "three"), ("two", "three one", "one one two")]  # prompt, chosen, rejected


@pytest.mark.distributed
def test_a_score_is_one_score_everywhere(tmp_path: Path) -> None:
    for name, (template, end, pad) in CASES.items():
        made = tokenizer(template)
        made.eos_token, made.pad_token = end, pad
        ids = {"vocab_size": len(made), "eos_token_id": made.eos_token_id, "pad_token_id": made.pad_token_id}
        make_checkpoints(tmp_path / name, family="llama", tied=False, changes=ids)
        made.save_pretrained(tmp_path / name / "reward")
        rows = [
            {
                "prompt": [message("user", prompt)],
                "chosen": [message("assistant", chosen)],
                "rejected": [message("assistant", rejected)],
            }
            for prompt, chosen, rejected in PAIRS
        ]
        (tmp_path / name / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = json.loads(run_ranks(2, "tests.roles.test_scored_token", tmp_path).stdout.splitlines()[-1])
    assert found.keys() == CASES.keys()
    for name, scores in found.items():
        expected = torch.tensor(scores["transformers"])
        assert expected.std() > 0.01, f"{name}: the scores are told apart"
        for whose in ("trained", "read by PPO"):
            error = (torch.tensor(scores[whose]) - expected).abs().max()
            assert error < 1e-5, f"{name}, {whose}: {scores}"


def main(root: Path) -> None:
    platform = platforms.start(seed=0)
    world = RunContext(platform, ProcessGroups(), Exchange(dist.group.WORLD, platform.device), bucket_bytes=600_000)
    found = {name: scores_of(root / name, world) for name in CASES}
    if platform.rank == 0:
        print(json.dumps(found))
    platforms.stop()


def scores_of(directory: Path, world: RunContext) -> dict[str, list[float]]:
    path = directory / "reward"
    model = {"model": str(path), "tensor_parallel_size": 2, "dtype": "float32"}
    trained = place_model("reward_model", TrainedRoleConfig(**model, optimizer=OptimizerConfig(lr=1e-3)), 2)
    read = place_model("reward.models.0", RewardModelConfig(**model), 2)
    pairs, rollout = pair_batch(examples(directory)), generated(directory)
    ours = {
        "trained": (TrainedRewardModel(trained, world=world, head_seed=0).scores(pairs), len(pairs)),
        "read by PPO": (RewardModel(read, world=world).scores(rollout), len(rollout)),
    }
    reference = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        theirs = [float(reference(ids[None]).logits) for ids in rollout.input_ids.split(rollout.lengths.tolist())]
    return {"transformers": theirs} | {name: whole(*its).tolist() for name, its in ours.items()}


def examples(directory: Path) -> list:
    made = load_tokenizer(directory / "reward")
    rows = load_examples(
        directory / "pairs.jsonl",
        made,
        kind="pairs",
        max_length=64,
        overlong="error",
        vocab_size=len(made),
    )
    return rows.draw(rows.order(0, False), len(PAIRS)).items


def generated(directory: Path) -> RolloutBatch:
    """As an engine answers: the template's prompt, what the answer's text is, and the end token, where it stops."""
    made = load_tokenizer(directory / "reward")
    prompts = load_prompts(
        directory / "pairs.jsonl",
        made,
        prompt_key="prompt",
        chat_template=True,
        max_length=64,
        overlong="error",
        vocab_size=len(made),
    )
    items = prompts.rows.draw(prompts.order(0, False), len(PAIRS)).items
    sequences, lengths = [], []
    for prompt, (_, *answers) in zip(items, PAIRS, strict=True):
        for answer in answers:
            response = made(answer, add_special_tokens=False)["input_ids"] + [made.eos_token_id]
            sequences.append(torch.tensor([*prompt.token_ids, *response]))
            lengths.append(len(prompt.token_ids))
    of = torch.tensor([len(ids) for ids in sequences])
    mask = [torch.arange(len(ids)) >= length for ids, length in zip(sequences, lengths, strict=True)]
    indices = torch.arange(len(PAIRS)).repeat_interleave(2)
    return RolloutBatch(
        torch.cat(sequences),
        of,
        torch.tensor(lengths),
        indices,
        torch.zeros(len(of), dtype=torch.bool),
        torch.cat(mask),
        torch.zeros(int(of.sum())),
    )


def whole(scores: PartialTensor, size: int) -> Tensor:
    assert len(scores.where) in (0, size), "a replica has all rows"
    out = torch.zeros(size)
    out[scores.where] = scores.values.float()
    return out


if __name__ == "__main__":
    main(Path(sys.argv[1]))
