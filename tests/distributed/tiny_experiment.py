"""A small valid experiment for whole runs of hybridflow.train: float32, two ranks or one, vLLM on a CPU."""

import json
from pathlib import Path

from tests.tiny_models import make_checkpoints, make_prompts

PROMPTS_PER_ITERATION = 4


def make_inputs(directory: Path) -> Path:
    """DIRECTORY with checkpoints, train.jsonl and heldout.jsonl."""
    make_checkpoints(directory, family="llama", tied=False, head_dim=32)  # vLLM on a CPU has no smaller heads
    make_prompts(directory / "train.jsonl", 16)
    make_prompts(directory / "heldout.jsonl", 5, seed=1)
    return directory


def make_uneven_prompts(path: Path) -> Path:
    """Sixteen sums, of 4, 6, 8, 10, 5, 7, 9, 7, 6, 8, 6, 8, 7, 5, 7 and 9 characters, a token each."""
    numbers = [(5 * i) % 16 for i in range(16)]
    sums = [f"{10 ** (i % 4)}+{10 ** (i // 4)}=" for i in numbers]
    path.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in sums))
    return path


def write_config(path: Path, inputs: Path) -> Path:
    """A config whose run directory is run/ beside it. Prompts come in the order of their file."""
    path.write_text(
        json.dumps(  # which is YAML
            {
                "name": "run",
                "seed": 1,
                "output_dir": str(path.parent),
                "num_iterations": 2,
                "data": {
                    "train": str(inputs / "train.jsonl"),
                    "prompts_per_iteration": PROMPTS_PER_ITERATION,
                    "max_prompt_length": 12,
                    "shuffle": False,
                },
                "sampling": {"max_response_length": 8},
                "actor": trained(inputs / "policy") | {"tensor_parallel_size": 2},
                "critic": trained(inputs / "critic"),
                "reference": model(inputs / "reference"),
                "reward": {"models": [model(inputs / "reward")]},
                "rollout": {"kv_cache_gib": 0.0625},
                "algorithm": {"update": {"mini_batch_size": 2}},
                "metrics": {"tensorboard": False},
            },
            indent=2,
        )
    )
    return path


def model(path: Path) -> dict:
    return {"model": str(path), "dtype": "float32"}


def trained(path: Path) -> dict:
    return model(path) | {"optimizer": {"lr": 1e-3}}
