"""Log-probs, entropies and gradients of logits that are made in chunks of rows, beside those of all logits at once; as
a module, those of a whole model on two ranks.

torchrun --nproc-per-node 2 -m tests.models.test_output_layer MODELS
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.architecture.spec import read_spec
from hybridflow.config import OptimizerConfig
from hybridflow.models import optimizer, pipeline
from hybridflow.models.build import build_model
from hybridflow.models.micro_batch import MicroBatch, padding, prediction_micro_batches
from hybridflow.models.output_layer import Outputs
from hybridflow.parallel import platform as platforms
from hybridflow.parallel import vocab
from hybridflow.parallel.grid import Grid, ProcessGroups
from hybridflow.parallel.layout import Layout
from hybridflow.parallel.vocab import vocab_kernels
from tests.distributed.train_batch import make_train_batch
from tests.launch import run_ranks
from tests.tiny_models import make_checkpoints

TIED = {"tied": True, "own": False}
LAYOUTS = {"tp2": (2, False), "tp2 sequence parallel": (2, True), "dp2": (1, False)}
CASES = [(tied, layout, fused) for tied in TIED for layout in LAYOUTS for fused in (True, False)]
FEW = 5 * 64  # logits at once: five rows of a rank's 64 columns, or two of 128
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    root = tmp_path_factory.mktemp("models")
    for name, tied in TIED.items():
        make_checkpoints(root / name, family="qwen2", tied=tied)
    done = run_ranks(2, "tests.models.test_output_layer", root)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_of_rows_change_nothing(case: tuple[str, str, bool], found: dict[str, dict[str, float]]) -> None:
    """Of a policy model that scores and that takes the gradients of two micro-batches in megatron's buffers."""
    of = found[str(case)]
    for name in ("log-probs", "entropies", "gradients"):
        assert of[name] < 1e-6, of


def main(root: Path) -> None:
    platform = platforms.start(seed=0)
    results = {str(case): measure(root, *case, platform.rank) for case in CASES}
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, results)
    worst = {case: {name: max(its[case][name] for its in gathered) for name in results[case]} for case in results}
    if platform.rank == 0:
        print(json.dumps(worst))
    platforms.stop()


def measure(root: Path, tied: str, layout: str, fused: bool, rank: int) -> dict[str, float]:
    whole = run(root / tied / "policy", *LAYOUTS[layout], fused=fused, rank=rank)
    with (
        mock.patch.object(vocab, "LOGITS_AT_ONCE", FEW),
        mock.patch.object(Outputs, "logits", side_effect=AssertionError("all logits are made")),
    ):
        chunked = run(root / tied / "policy", *LAYOUTS[layout], fused=fused, rank=rank)
    names = ("log-probs", "entropies", "gradients")
    return {name: float((x - y).abs().max() / y.abs().max()) for name, x, y in zip(names, chunked, whole, strict=True)}


def run(model: Path, tp: int, sequence_parallel: bool, *, fused: bool, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, entropies, all gradients in megatron's buffers)."""
    spec, grid = read_spec(model), Grid.build(Layout(tp, 1, 2 // tp, (0, 1)), ProcessGroups())
    options = dict(sequence_parallel=sequence_parallel, recompute="none", device=torch.device("cpu"))
    chunks = build_model(spec, grid, head="lm", dtype="float32", **options)
    add = optimizer.fuse_weight_gradients if fused else lambda model: None
    with mock.patch.object(optimizer, "fuse_weight_gradients", add):
        trained = optimizer.TrainedModel(chunks, grid, OptimizerConfig(lr=1e-3), bucket_bytes=None, overlap=False)
    batch, kernels = make_train_batch(), vocab_kernels()
    rows = list(range(len(batch)))[grid.dp_rank :: grid.dp]
    longest = int(batch.lengths.sum()) // (2 * grid.dp) + 8
    micro_batches = prediction_micro_batches(
        batch, rows, max_tokens=longest, padded=padding(tp), device=torch.device("cpu")
    )
    assert len(micro_batches) == 2

    def both(outputs: Outputs, mb: MicroBatch) -> tuple[Tensor, Tensor]:
        return outputs.log_probs_and_entropy(
            mb.targets, vocab_size=spec.vocab_size, temperature=TEMPERATURE, kernels=kernels
        )

    def loss(outputs: Outputs, mb: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        log_probs, entropy = both(outputs, mb)
        return (batch.advantages[mb.where] * log_probs + 0.1 * entropy).sum(), {}

    scored = pipeline.forward(trained.chunks, grid, micro_batches, lambda x, mb: {"both": torch.stack(both(x, mb))})
    trained.zero_gradients()
    pipeline.forward_backward(trained.chunks, grid, micro_batches, loss)
    gradients = torch.cat([p.main_grad.flatten() for chunk in chunks for p in chunk.parameters()])
    return *torch.cat([its["both"] for its in scored], dim=1), gradients


# ------------------------------------------------------------------------------------------------ memory


@pytest.fixture(scope="module")
def peaks() -> list[dict[str, Any]]:
    """In a process of its own, whose only process group is torch's fake one."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.output_layer", "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.thorough
def test_a_plan_counts_what_is_there_at_once(peaks: list[dict[str, Any]]) -> None:
    """Of 16,384 rows and 151,936 columns on meta tensors, by each tensor-parallel size."""
    assert {its["tp"] for its in peaks} == {1, 2, 8}
    for its in peaks:
        assert 0.98 * its["counted"] < its["peak"] < 1.02 * its["counted"], its  # few numbers a row are not counted


@pytest.mark.slow
def test_logits_are_not_all_there(peaks: list[dict[str, Any]]) -> None:
    """4.6 GiB of them; kept of them is 0.5 GiB, beside float32 copies of a chunk's chunks or the weight's gradient."""
    (scoring,) = (its for its in peaks if its["tp"] == 1 and its["pass"] == "scoring")
    (update,) = (its for its in peaks if its["tp"] == 1 and its["pass"] == "update")
    assert scoring["all at once"] > 5.1 * 2**30 and scoring["peak"] < 1.0 * 2**30
    assert update["all at once"] > 5.8 * 2**30 and update["peak"] < 1.8 * 2**30


if __name__ == "__main__":
    main(Path(sys.argv[1]))
