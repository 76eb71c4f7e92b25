"""Ranks that have unlike things, one after the other; each rank writes what it was told.

torchrun --nproc-per-node 2 -m tests.parallel.agreement_worker CASES OUT

CASES has config.yaml, and in 0/ and 1/ what the ranks find in their working directories.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from hybridflow.architecture.spec import read_spec
from hybridflow.config import ExperimentConfig
from hybridflow.data.digests import run_digests
from hybridflow.data.inputs import load_inputs
from hybridflow.errors import DisagreementError, UserError
from hybridflow.parallel import platform, torchrun
from hybridflow.parallel.agreement import check_agreement, digest_tensors
from hybridflow.trainers.online import OnlineTrainer
from hybridflow.user_code import search_beside

Check = Callable[[], object]


def main(cases: Path, out: Path) -> None:
    rank, _ = torchrun.torchrun_rank()
    os.chdir(cases / str(rank))
    platform.start(0)
    heard = {name: told(check) for name, check in checks(cases / "config.yaml", rank)}
    (out / f"{rank}.json").write_text(json.dumps(heard))
    dist.barrier(group=dist.group.WORLD)
    platform.stop()


def told(check: Check) -> str:
    try:
        check()
    except UserError as error:
        return f"{type(error).__name__}: {error}" if not isinstance(error, DisagreementError) else str(error)
    return "alike"


def checks(config: Path, rank: int) -> Iterator[tuple[str, Check]]:
    """By name. In the ranks' working directories same.jsonl is alike; all else is not."""
    batch = {"input_ids": torch.arange(9), "values": torch.zeros(9)}
    other = batch | {"values": torch.zeros(9).index_fill(0, torch.tensor([rank]), -0.0)}
    yield "alike", lambda: start(config)
    yield "prompts", lambda: start(config, "data.train=other.jsonl")
    yield "config", lambda: start(config, f"seed={rank}", f"algorithm.gamma=0.{rank}")
    yield "tokenizer and model", lambda: start(config, "actor.model=changed")
    yield "function", lambda: start(config, "reward.functions.0.function=rank_rewards:f")
    yield "heldout on one", lambda: start(config, *["data.heldout=same.jsonl"] * rank)
    yield "batch alike", lambda: iteration(batch)
    yield "batch", lambda: iteration(other)
    yield "other names", lambda: iteration(batch if rank else {"values": batch["values"]})
    yield "trainer", lambda: OnlineTrainer.from_yaml(str(config), ["data.train=other.jsonl"])


def start(path: Path, *overrides: str) -> None:
    search_beside(path)
    config = ExperimentConfig.from_yaml(path, overrides)
    check_agreement(
        run_digests(config, load_inputs(config, read_spec(config.actor.model).vocab_size)), dist.group.WORLD
    )


def iteration(batch: dict[str, torch.Tensor]) -> None:
    check_agreement({"the batch of iteration 3": digest_tensors(batch)}, dist.group.WORLD)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
