"""What every program is given to do, and what it tells when it has done it. Standard library alone: all environments
read this.

A job is a file: the driver writes it, a program reads it and writes what it measured beside it.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

PHASES = ("rollout", "score", "update", "total")
PAD, UNKNOWN, END = 0, 1, 2  # token ids; prompts are of those from FIRST_WORD on
FIRST_WORD = 3
NUM_PROMPTS = 64  # in the file of prompts
LEARNING_RATE = 1e-6
KL_COEF = 0.05
Seconds = dict[str, float]  # by phase


@dataclass(frozen=True)
class Workload:
    """`prompts` of min_prompt to max_prompt tokens an iteration, `samples` responses to each.

    ends: responses end where the model says so, else all have max_response tokens.
    """

    algorithm: Literal["ppo", "grpo"]
    prompts: int
    samples: int
    min_prompt: int
    max_prompt: int
    max_response: int
    ends: bool
    mini_batches: int = 4  # optimizer steps of the iteration's one epoch

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def mini_batch(self) -> int:
        return self.sequences // self.mini_batches


WORKLOADS = {
    "fixed": Workload("ppo", 64, 1, 64, 64, 128, ends=False),
    "varying": Workload("ppo", 64, 1, 16, 96, 256, ends=True),
    "groups": Workload("grpo", 8, 8, 64, 64, 128, ends=False),
    "groups-long-prompts": Workload("grpo", 8, 8, 256, 256, 64, ends=False),
}


@dataclass(frozen=True)
class Size:
    """A Llama with grouped key/value heads."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 4096


SIZES = {
    "S": Size(hidden=256, ffn=768, layers=4, heads=4),  # 5.2 M parameters
    "M": Size(hidden=384, ffn=1024, layers=6, heads=6),  # 12.6 M
}


@dataclass(frozen=True)
class Job:
    """models: the directory of `actor`, `critic` and `reward`. iterations: measured, after one that is not."""

    workload: Workload
    models: str
    prompts: str
    dtype: str
    iterations: int
    scratch: str

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> "Job":
        tree = json.loads(path.read_text())
        return cls(**tree | {"workload": Workload(**tree["workload"])})

    def model(self, kind: str) -> str:
        return str(Path(self.models) / kind)


@dataclass(frozen=True)
class Measured:
    """Of each iteration, in order: seconds by phase, and how many tokens the responses had."""

    seconds: list[Seconds]
    response_tokens: list[int]

    def write(self, job: Path) -> None:
        result_of(job).write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, job: Path) -> "Measured":
        return cls(**json.loads(result_of(job).read_text()))


def result_of(job: Path) -> Path:
    return job.with_suffix(".result.json")


def phases(rollout: float, score: float, update: float) -> Seconds:
    return {"rollout": rollout, "score": score, "update": update, "total": rollout + score + update}


def slowest(ranks: Sequence[list[Seconds]]) -> list[Seconds]:
    """Of each iteration and phase the largest of any rank."""
    return [{name: max(row[name] for row in rows) for name in PHASES} for rows in zip(*ranks, strict=True)]


def prompt_texts(path: str) -> list[str]:
    return [json.loads(line)["prompt"] for line in Path(path).read_text().splitlines()]


def prompt_ids(path: str) -> list[list[int]]:
    return [[int(word[1:]) for word in text.split()] for text in prompt_texts(path)]
