"""The tokens of whole runs beside HuggingFace models with the weights of each version of the actor."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybridflow.batch import RolloutBatch
from hybridflow.checkpoint.store import step_name
from hybridflow.cli.convert import main as convert

FIELDS = {"input_ids", "lengths", "prompt_lengths", "prompt_indices", "truncated", "response_mask"}
FIELDS |= {"rollout_log_probs", "environment_rewards", "branch_starts", "versions"}


def rollout_of(run: Path, iteration: int) -> RolloutBatch:
    found = load_file(run / "batches" / f"iteration_{iteration:06d}.safetensors")
    return RolloutBatch(**{key: x for key, x in found.items() if key in FIELDS})


def log_probs_of(run: Path, version: int, batch: RolloutBatch, directory: Path) -> torch.Tensor:
    """By the weights of a checkpoint of the run, which is converted to `directory`."""
    path = run.parent.parent / "policy"
    if version:
        path = directory / str(version)
        if not path.exists():
            convert(["megatron-to-hf", str(run / "checkpoints" / step_name(version) / "actor"), str(path)])
    model, expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), []
    for ids in batch.input_ids.split(batch.branch_lengths.tolist()):
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0].log_softmax(-1)
        expected.append(torch.cat([torch.zeros(1), log_probs[:-1].gather(1, ids[1:, None]).flatten()]))
    return torch.cat(expected)


def checked_ages(run: Path, num_iterations: int, directory: Path) -> set[int]:
    """Each token's log-prob is that of the token's version. Returns the ages of tokens when they are trained on."""
    ages = set[int]()
    for iteration in range(1, num_iterations + 1):
        batch = rollout_of(run, iteration)
        versions = batch.versions[:, 0]
        for version in versions[batch.response_mask].unique().tolist():
            some = batch.response_mask & (versions == version)
            expected = log_probs_of(run, version, batch, directory)
            torch.testing.assert_close(batch.rollout_log_probs[some], expected[some], rtol=0, atol=1e-4)
            ages.add(iteration - 1 - version)
        assert (batch.rollout_log_probs[~batch.response_mask] == 0).all()
    return ages
