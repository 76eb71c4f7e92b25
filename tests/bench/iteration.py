"""Seconds and tokens/s of each phase of one iteration, beside what the machine's matrix products would allow.

    torchrun --nproc-per-node 2 -m tests.bench.iteration [--size small medium] [--dtype float32 bfloat16] [--profile]

Random Llama models of the given size play actor, critic, reference and reward model: 64 prompts x (64 + 128) tokens,
one epoch, 4 mini-batches by default. Every number is the median over the measured iterations of this one run; the
matrix-product rate is measured in the same run, on all ranks at once, just before. Seconds are the largest of any rank.

    torchrun --nproc-per-node 2 -m tests.bench.iteration --mean-response-length 40 --response-length 256 --waiting

Responses of 4 to 256 tokens, 40 on average: what it takes where replicas that are done score meanwhile, and where they
wait. The same iteration again and again, the ways in turn.

    torchrun --nproc-per-node 2 -m tests.bench.iteration --prompts 8 --samples 8 [--whole-prompts] [--profile]

GRPO in place of PPO: so many responses to each prompt, scored by a function, a KL in the loss.

With --profile further iterations follow, with and without the profiler by turns, and a table says where their seconds
go: of each phase what is products, attention and so on, the mean of all ranks.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from hybridflow.architecture.spec import ModelSpec
from hybridflow.architecture.weights import num_parameters
from hybridflow.config import ExperimentConfig
from hybridflow.flows.overlapped_scoring import OverlappedScoring
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.recording.recorder import Recorder
from hybridflow.trainers.online import OnlineTrainer
from tests.bench.operators import Cells, print_profile, profiled

SIZES = {  # hidden, ffn, layers, heads
    "small": (256, 672, 5, 4),  # 5.2 M parameters
    "medium": (384, 1024, 6, 6),  # 12.6 M
}
VOCAB_SIZE = 2560
END = 1
GOALS = {("small", "float32"): 4.5, ("medium", "float32"): 9.5, ("small", "bfloat16"): 1.8, ("medium", "bfloat16"): 3.2}
PRODUCT = (3072, 384, 1024)
WAITING = (
    "time/iteration_seconds",
    "time/rollout_seconds",
    "time/estimate_seconds",
    "time/update_seconds",
    "time/scored_while_waiting_seconds",
    "time/idle_fraction",
    "rollout/response_length_mean",
    "rollout/response_length_max",
)
PHASES = ("generate", "reward", "log_probs", "reference", "values", "critic_update", "actor_update", "iteration")


@dataclass(frozen=True)
class Shape:
    prompts: int
    prompt_length: int
    response_length: int
    mini_batches: int
    mean_length: int | None = None  # of responses that end by chance; None: all have the full length
    samples: int = 1  # of a prompt; several: GRPO
    whole_prompts: bool = False  # mini-batches have all responses of their prompts

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def tokens(self) -> int:
        return self.sequences * (self.prompt_length + self.response_length)


def main() -> None:
    options = parse()
    shape = Shape(
        options.prompts,
        options.prompt_length,
        options.response_length,
        options.mini_batches,
        options.mean_response_length,
        options.samples,
        options.whole_prompts,
    )
    with inputs(options.size, shape) as directory:
        for size in options.size:
            for dtype in options.dtype:
                run = compare_waiting if options.waiting else bench
                run(size, dtype, shape, options, directory / size)


@contextlib.contextmanager
def directory_of_all() -> Iterator[Path]:
    """The first rank's, gone after the block: ranks must agree on the paths of their config."""
    with tempfile.TemporaryDirectory() as own:
        box = [own]
        dist.broadcast_object_list(box, src=0, group=dist.group.WORLD)
        yield Path(box[0])
        dist.barrier(group=dist.group.WORLD)


@contextlib.contextmanager
def inputs(sizes: Sequence[str], shape: Shape) -> Iterator[Path]:
    """DIRECTORY/SIZE, made by the first rank."""
    platform = platforms.start(seed=0)
    with directory_of_all() as directory:
        for size in sizes if platform.rank == 0 else ():
            make_inputs(directory / size, size, shape)
        dist.barrier(group=dist.group.WORLD)
        yield directory


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--response-length", type=int, default=128)
    parser.add_argument("--mini-batches", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=3, help="measured, after one that is not")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size of every role and of the engine")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages of every role; the rest is data-parallel")
    parser.add_argument("--mean-response-length", type=int, help="responses end by chance, after 4 tokens at least")
    parser.add_argument("--samples", type=int, default=1, help="responses to a prompt; several: GRPO in place of PPO")
    parser.add_argument("--whole-prompts", action="store_true", help="mini-batches have all responses of their prompts")
    parser.add_argument("--waiting", action="store_true", help="compare with replicas that score meanwhile")
    parser.add_argument("--profile", action="store_true", help="say where the seconds go; on CPUs alone")
    return parser.parse_args()


def bench(size: str, dtype: str, shape: Shape, options: argparse.Namespace, directory: Path) -> None:
    trainer = OnlineTrainer(config(directory, dtype, shape, options.tp, options.pp))
    rate = matrix_product_rate(dtype)
    seconds = []
    for iteration in range(1, options.iterations + 2):
        done = trainer.iterate(iteration, 10**6, Recorder())
        known = {name: done.metrics.get(f"time/{name}_seconds") for name in PHASES}
        seconds.append({name: float(value) for name, value in known.items() if value is not None})
    medians = {name: statistics.median(run[name] for run in seconds[1:]) for name in seconds[0]}
    if trainer.platform.rank == 0:
        show = report_groups if shape.samples > 1 else report
        show(size, dtype, shape, trainer.roles.actor.spec, medians, rate)
    if options.profile:
        profile_iterations(trainer, options.iterations, f"{size}, {dtype}")


def profile_iterations(trainer: OnlineTrainer, count: int, title: str) -> None:
    """As many iterations with the profiler as without, by turns: means over them and over the ranks."""
    assert not trainer.platform.has_cuda, "--profile is for CPUs: on GPUs operators end after the calls that start them"
    plain: list[float] = []
    cells: list[Cells] = []
    measured: list[dict[str, float]] = []
    for _ in range(count):
        plain.append(float(iterated(trainer)["time/iteration_seconds"]))
        of_operators, of_phases = profiled(lambda: iterated(trainer))
        cells.append(of_operators)
        measured.append(of_phases)
    mine = {"plain": mean_of([{"seconds": x} for x in plain]), "cells": mean_of(cells), "measured": mean_of(measured)}
    ranks: list[dict] = [{}] * trainer.platform.world_size
    dist.all_gather_object(ranks, mine, group=dist.group.WORLD)
    if trainer.platform.rank == 0:
        of_all = {name: mean_of([rank[name] for rank in ranks]) for name in mine}
        title = f"{title}: seconds of an iteration under the profiler, mean of {count} and of {len(ranks)} ranks"
        print_profile(of_all["cells"], of_all["measured"], plain=of_all["plain"]["seconds"], title=title)


def iterated(trainer: OnlineTrainer) -> dict:
    return trainer.iterate(trainer.run.iteration + 1, 10**6, Recorder()).metrics


def mean_of(rows: Sequence[dict]) -> dict:
    """By key; what a row lacks is zero."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return {key: sum(row.get(key, 0.0) for row in rows) / len(rows) for key in keys}


def compare_waiting(size: str, dtype: str, shape: Shape, options: argparse.Namespace, directory: Path) -> None:
    """The first iteration, by either way in turn."""
    trainer = OnlineTrainer(config(directory, dtype, shape, options.tp, options.pp))
    run, state, scores = trainer.run, trainer.run.state, trainer.source.scoring
    waits = OverlappedScoring(
        [],
        trainer.roles.scorer,
        trainer.placed.rollout,
        actor=trainer.roles.actor,
        sampling=trainer.config.sampling,
        rank=trainer.platform.rank,
        groups=ProcessGroups(),
        notices=None,
        exchange=trainer.exchange,
        watch=trainer.book.watch,
    )
    found: dict[str, list[dict[str, float]]] = {"waits": [], "scores meanwhile": []}
    for _ in range(options.iterations + 1):
        for way, ahead in (("waits", waits), ("scores meanwhile", scores)):
            scores.disable()
            run.state, trainer.source.scoring = state, ahead
            done = trainer.iterate(1, 10**6, Recorder())
            found[way].append({name: float(done.metrics.get(name, 0.0)) for name in WAITING})
    if trainer.platform.rank == 0:
        table = Table(title=f"{size}, {dtype}: medians of {options.iterations}, load {os.getloadavg()[0]:.1f}")
        for column in ("", *found, "ratio"):
            table.add_column(column, justify="right" if column else "left")
        for name in WAITING:
            one, other = (statistics.median(row[name] for row in rows[1:]) for rows in found.values())
            table.add_row(name, f"{one:.3f}", f"{other:.3f}", f"{other / one:.2f}" if one else "")
        Console(width=100).print(table)


def make_inputs(directory: Path, size: str, shape: Shape) -> None:
    hidden, ffn, layers, heads = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=shape.prompt_length + shape.response_length,
        num_labels=1,
    )
    vocabulary = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w0")))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    for name, model_class in (("policy", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        model_class(config).save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    ids = torch.randint(0, VOCAB_SIZE, (shape.prompts, shape.prompt_length)).tolist()
    lines = [json.dumps({"prompt": " ".join(f"w{i}" for i in row)}) for row in ids]
    (directory / "prompts.jsonl").write_text("\n".join(lines))


def config(directory: Path, dtype: str, shape: Shape, tp: int, pp: int) -> ExperimentConfig:
    num_layers = SIZES[directory.name][2]

    def role(name: str, **fields: object) -> dict:
        parallel = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
        if pp > 1:  # what does not divide is the last stage's
            parallel["num_layers_in_last_pipeline_stage"] = num_layers - num_layers // pp * (pp - 1)
        return {"model": str(directory / name), "dtype": dtype, **parallel, **fields}

    return ExperimentConfig.model_validate(
        {
            "name": "bench",
            "num_iterations": 1,
            "data": {
                "train": str(directory / "prompts.jsonl"),
                "prompts_per_iteration": shape.prompts,
                "max_prompt_length": shape.prompt_length,
            },
            "sampling": {
                "samples_per_prompt": shape.samples,
                "max_response_length": shape.response_length,
                **ends(shape),
            },
            "actor": role("policy", optimizer={"lr": 1e-6}),
            "reference": role("policy"),
            "rollout": {"kv_cache_gib": 0.5},
            **(grouped(shape) if shape.samples > 1 else with_critic(shape, role("reward"))),
        }
    )


def with_critic(shape: Shape, reward: dict) -> dict:
    return {
        "critic": reward | {"optimizer": {"lr": 1e-6}},
        "reward": {"models": [reward]},
        "algorithm": {"name": "ppo", "update": {"mini_batch_size": shape.sequences // shape.mini_batches}},
    }


def grouped(shape: Shape) -> dict:
    update = {"mini_batch_size": shape.sequences // shape.mini_batches, "whole_prompts": shape.whole_prompts}
    return {
        "reward": {"functions": [{"function": "tests.bench.peer_programs.scores:by_length"}]},
        "algorithm": {"name": "grpo", "kl": {"coef": 0.05}, "update": update},
    }


def ends(shape: Shape) -> dict:
    """How responses end: at the limit, or at each token after the fourth with a probability of about 1 / the mean."""
    if shape.mean_length is None:
        return {"ignore_eos": True}
    bias = math.log((VOCAB_SIZE - 1) / (shape.mean_length - 5))  # logits of random weights are nearly alike
    return {"ignore_eos": True, "stop_token_ids": [END], "logit_bias": {END: bias}, "min_response_length": 4}


def matrix_product_rate(dtype: str) -> float:
    """FLOP/s of this machine: the sum over ranks of an m x k x n product, all ranks at once."""
    m, k, n = PRODUCT
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = (torch.randn(*size, dtype=getattr(torch, dtype), device=device) for size in ((m, k), (k, n)))
    for _ in range(5):
        a @ b
    dist.barrier(group=dist.group.WORLD)
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < 1.0:
        for _ in range(10):
            a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        count += 10
    rate = torch.tensor(2.0 * m * k * n * count / (time.perf_counter() - started), device=device)
    dist.all_reduce(rate, group=dist.group.WORLD)
    return float(rate)


def forward_flops(spec: ModelSpec, tokens: int, length: int) -> float:
    """Of a forward pass over all tokens without the output layer: 2 a parameter and token, and attention."""
    embeddings = spec.vocab_size * spec.hidden_size * (1 if spec.head == "score" or spec.tied else 2)
    layers = num_parameters(spec, spec.head) - embeddings
    attention = 4 * spec.num_layers * spec.num_heads * spec.head_dim * length / 2
    return tokens * (2 * layers + attention)


def titled(size: str, dtype: str, spec: ModelSpec, rate: float, *columns: str) -> Table:
    millions = num_parameters(spec, spec.head) / 1e6
    table = Table(title=f"{size} ({millions:.1f} M parameters), {dtype}, matrix products {rate / 1e12:.2f} TFLOP/s")
    for column in columns:
        table.add_column(column, justify="left" if column == "phase" else "right")
    return table


def report_groups(size: str, dtype: str, shape: Shape, spec: ModelSpec, seconds: dict[str, float], rate: float) -> None:
    """Prompts are run once for several responses, as far as they meet: there is no share of the rate to tell."""
    table = titled(size, dtype, spec, rate, "phase", "seconds", "tokens/s")
    for name, value in seconds.items():
        tokens = shape.sequences * shape.response_length if name == "generate" else shape.tokens
        table.add_row(name, f"{value:.3f}", f"{tokens / value:.0f}")
    together = "of whole prompts" if shape.whole_prompts else "of any rows"
    table.caption = f"GRPO, {shape.prompts} x {shape.samples} responses, mini-batches {together}"
    Console(width=100).print(table)


def report(size: str, dtype: str, shape: Shape, spec: ModelSpec, seconds: dict[str, float], rate: float) -> None:
    body = forward_flops(spec, shape.tokens, shape.prompt_length + shape.response_length)
    response_tokens = shape.prompts * shape.response_length
    head = 2.0 * response_tokens * spec.vocab_size * spec.hidden_size
    flops = {
        "generate": body + head,
        "reward": body,
        "log_probs": body + head,
        "reference": body + head,
        "values": body,
        "critic_update": 3 * body,
        "actor_update": 3 * (body + head),
    }
    total = seconds["iteration"]
    table = titled(size, dtype, spec, rate, "phase", "seconds", "tokens/s", "share of the rate")
    for name, work in flops.items():
        tokens = response_tokens if name == "generate" else shape.tokens
        share = work / seconds[name] / rate
        table.add_row(name, f"{seconds[name]:.3f}", f"{tokens / seconds[name]:.0f}", f"{share:.1%}")
    share = sum(flops.values()) / total / rate
    table.add_row("iteration", f"{total:.3f}", f"{shape.tokens / total:.0f}", f"{share:.1%}")
    table.caption = f"goal for an iteration of the default shape on the 2-core test machine: {GOALS[size, dtype]} s"
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
