"""The model of time against the real trainer: iterations of many layouts, predicted and measured, in one run.

    python -m tests.bench.plan_times [--layouts NAME ...] [--ranks 2 4 8] [--iterations 3] [--profile FILE]

Measures the machine (`hybridflow.plan --profile-device`, with as many ranks as the largest layout) unless a profile is
given, then runs PPO with four random Llama models in every layout of `LAYOUTS` and in two sizes, layout after layout:
32 prompts x (32 + 48) tokens, 2 mini-batches. An iteration's seconds are the median of those measured, after one that
is not; one in which other processes took part of the machine is run again. Prints the seconds of each phase, predicted
and measured, Kendall's tau of the iterations over all layouts of a size, and how far the predicted winner is from the
measured best. --json FILE keeps the measured seconds; with --measured FILE they are taken from there and nothing runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SIZES = {"small": (192, 512, 4, 4), "medium": (384, 1024, 6, 8)}  # hidden, ffn, layers, heads
VOCAB_SIZE = 2560
PROMPTS, PROMPT, RESPONSE, MINI_BATCHES = 32, 32, 48, 2
ROLES = ("actor", "critic", "reference", "reward")
MOST_OTHERS, TRIES = 0.08, 5  # of the processors; an iteration in which others took more is run again, so often
PHASES = ("generate", "reward", "log_probs", "reference", "values", "critic_update", "actor_update")

Sizes = dict[str, Any]


def same(**sizes: Any) -> dict[str, Sizes]:
    return {role: dict(sizes) for role in ROLES}


def split(actors: Sizes, critics: Sizes) -> dict[str, Sizes]:
    """Actor, reference and engine on ranks of their own, and so critic and reward model."""
    return {"actor": actors, "reference": actors, "critic": critics, "reward": critics}


def sizes(tp: int = 1, pp: int = 1, budget: int = 16384, ranks: str | None = None) -> Sizes:
    found: Sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "micro_batch_tokens": budget}
    return found | ({} if ranks is None else {"ranks": ranks})


# name: (ranks, sizes of each role, sizes of the engine)
LAYOUTS: dict[str, tuple[int, dict[str, Sizes], Sizes]] = {
    "2: dp 2": (2, same(**sizes()), {}),
    "2: tp 2": (2, same(**sizes(tp=2)), {}),
    "2: pp 2": (2, same(**sizes(pp=2, budget=320)), {}),
    "2: dp 2, a row at a time": (2, same(**sizes(budget=80)), {}),
    "2: actor | critic": (2, split(sizes(ranks="0"), sizes(ranks="1")), {}),
    "2: tp 2, engine tp 1": (2, same(**sizes(tp=2)), {"tensor_parallel_size": 1}),
    "4: dp 4": (4, same(**sizes()), {}),
    "4: tp 2 dp 2": (4, same(**sizes(tp=2)), {}),
    "4: pp 2 dp 2": (4, same(**sizes(pp=2, budget=160)), {}),
    "4: tp 4": (4, same(**sizes(tp=4)), {}),
    "4: tp 2 pp 2, two rows": (4, same(**sizes(tp=2, pp=2, budget=160)), {}),
    "4: actor tp 2 | critic dp 2": (4, split(sizes(tp=2, ranks="0-1"), sizes(ranks="2-3")), {}),
    "4: dp 4, engine tp 2": (4, same(**sizes()), {"tensor_parallel_size": 2}),
    "8: dp 8": (8, same(**sizes()), {}),
    "8: tp 2 pp 2 dp 2": (8, same(**sizes(tp=2, pp=2, budget=320)), {}),
    "8: tp 4 dp 2, engine tp 2": (8, same(**sizes(tp=4)), {"tensor_parallel_size": 2}),
    "8: actor tp 2 dp 2 | critic dp 4": (8, split(sizes(tp=2, ranks="0-3"), sizes(ranks="4-7")), {}),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="NAME")
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8], help="layouts of so many ranks alone")
    parser.add_argument("--iterations", type=int, default=3, help="measured, after one that is not")
    parser.add_argument("--profile", help="a profile of this machine; without it the bench measures one")
    parser.add_argument("--json", help="where the measured seconds are written")
    parser.add_argument("--measured", nargs="+", help="what --json has written: nothing runs")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.worker:
        work(options, Path(options.worker))
        return
    with tempfile.TemporaryDirectory() as own:
        directory = Path(own)
        make_inputs(directory, options.size)
        profile = options.profile or measured_profile(directory, max(options.ranks))
        if options.measured:
            found = {key: row for file in options.measured for key, row in json.loads(Path(file).read_text()).items()}
        else:
            found = dict(measured(options, directory))
        if options.json:
            Path(options.json).write_text(json.dumps(found, indent=1))
        report(found, directory, profile)


# ------------------------------------------------------------------------------------------------ measured


def measured_profile(directory: Path, ranks: int) -> str:
    file = str(directory / "profile.json")
    torchrun(ranks, "-m", "hybridflow.plan", "--profile-device", "--output", file)
    return file


def measured(options: argparse.Namespace, directory: Path) -> Iterator[tuple[str, dict[str, float]]]:
    """(size/layout, seconds by phase), a launch for each number of ranks."""
    for ranks in options.ranks:
        names = [name for name in options.layouts if LAYOUTS[name][0] == ranks]
        if names:
            arguments = ["--worker", str(directory), "--iterations", str(options.iterations)]
            torchrun(ranks, "-m", "tests.bench.plan_times", *arguments, "--size", *options.size, "--layouts", *names)
            yield from json.loads((directory / "found.json").read_text()).items()


def torchrun(ranks: int, *arguments: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    subprocess.run([*command, *arguments], check=True)


def work(options: argparse.Namespace, directory: Path) -> None:
    """On every rank: the layouts one after the other, all of this number of ranks."""
    from hybridflow.parallel import platform as platforms
    from hybridflow.roles.generator import Generator
    from hybridflow.trainers.online import OnlineTrainer

    platform = platforms.start(seed=0)
    found: dict[str, dict[str, float]] = {}
    for size in options.size:
        for name in options.layouts:
            trainer = OnlineTrainer(config(directory / size, name))
            rows: list[dict[str, float]] = []
            iterated(trainer, 1)
            for iteration in range(2, 2 + TRIES):
                rows.append(iterated(trainer, iteration))
                if sum(row["others"] < MOST_OTHERS for row in rows) == options.iterations:
                    break
            rows = sorted(rows, key=lambda row: row["others"])[: options.iterations]
            found[f"{size}/{name}"] = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            if platform.rank == 0:
                row = found[f"{size}/{name}"]
                print(f"{size}, {name}: {row['time/iteration_seconds']:.2f} s, others {row['others']:.0%}", flush=True)
            if isinstance(trainer.generator, Generator) and trainer.generator.engine is not None:
                trainer.generator.engine.close()
            del trainer
    if platform.rank == 0:
        (directory / "found.json").write_text(json.dumps(found))
    platforms.stop()


def iterated(trainer: Any, iteration: int) -> dict[str, float]:
    """Seconds by phase, and the share of the processors' time that processes other than these ranks took."""
    import torch
    import torch.distributed as dist

    from hybridflow.recording.recorder import Recorder

    dist.barrier(group=dist.group.WORLD)
    before, own_before, began = busy_seconds(), own_seconds(), time.monotonic()
    done = trainer.iterate(iteration, 10**6, Recorder())
    assert done is not None, "no step is lost"
    own = torch.tensor(own_seconds() - own_before, dtype=torch.float64)
    dist.all_reduce(own, group=dist.group.WORLD)
    dist.barrier(group=dist.group.WORLD)
    passed = (time.monotonic() - began) * (os.cpu_count() or 1)
    others = torch.tensor((busy_seconds() - before - float(own)) / passed, dtype=torch.float64)
    dist.broadcast(others, src=0, group=dist.group.WORLD)  # all ranks decide alike
    times = {key: float(value) for key, value in done.metrics.items() if key.startswith("time/")}
    return {**times, "others": max(0.0, float(others))}


def own_seconds() -> float:
    """Of this rank; the first one has torchrun's, which keeps the store, too."""
    own = time.process_time()
    if os.environ["RANK"] == "0":
        fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        own += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own


def busy_seconds() -> float:
    """Of all processors, in processes."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return sum(fields[:3]) / os.sysconf("SC_CLK_TCK")


def make_inputs(directory: Path, names: Sequence[str]) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

    vocabulary = {f"w{i}": i for i in range(VOCAB_SIZE)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="w0")))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    lines = [
        json.dumps({"prompt": " ".join(f"w{i}" for i in row)})
        for row in torch.randint(0, VOCAB_SIZE, (PROMPTS, PROMPT)).tolist()
    ]
    for name in names:
        hidden, ffn, layers, heads = SIZES[name]
        llama = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=hidden,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=PROMPT + RESPONSE,
            num_labels=1,
        )
        for role, model in (("policy", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
            model(llama).save_pretrained(directory / name / role)
            tokenizer.save_pretrained(directory / name / role)
        (directory / name / "prompts.jsonl").write_text("\n".join(lines))


def config(directory: Path, name: str) -> Any:
    from hybridflow.config import ExperimentConfig

    _, roles, engine = LAYOUTS[name]

    def role(key: str, model: str, **fields: Any) -> dict[str, Any]:
        return {"model": str(directory / model), "dtype": "float32", **roles[key], **fields}

    return ExperimentConfig.model_validate(
        {
            "name": "bench",
            "num_iterations": 1,
            "data": {
                "train": str(directory / "prompts.jsonl"),
                "prompts_per_iteration": PROMPTS,
                "max_prompt_length": PROMPT,
            },
            "sampling": {"max_response_length": RESPONSE, "ignore_eos": True},
            "actor": role("actor", "policy", optimizer={"lr": 1e-6}),
            "critic": role("critic", "reward", optimizer={"lr": 1e-6}),
            "reference": role("reference", "policy"),
            "reward": {"models": [role("reward", "reward")]},
            "rollout": {"kv_cache_gib": 0.125, **engine},
            "algorithm": {"update": {"mini_batch_size": PROMPTS // MINI_BATCHES}},
        }
    )


# ------------------------------------------------------------------------------------------------ predicted


def report(found: Mapping[str, Mapping[str, float]], directory: Path, profile_file: str) -> None:
    from hybridflow.automap.device import load_profile
    from hybridflow.automap.timing import predict
    from hybridflow.placement.placed import place

    profile, console = load_profile(profile_file), Console(width=190)
    for size in dict.fromkeys(key.split("/")[0] for key in found):
        table = Table(title=f"{size}: seconds, predicted / measured")
        for column in ("layout", "iteration", *PHASES):
            table.add_column(column, justify="left" if column == "layout" else "right")
        pairs: dict[str, tuple[float, float]] = {}
        for key, row in found.items():
            if not key.startswith(f"{size}/"):
                continue
            name = key.split("/", 1)[1]
            told = predict(place(config(directory / size, name), LAYOUTS[name][0], cuda=False), profile)
            pairs[name] = told.seconds, row["time/iteration_seconds"]
            cells = [(told.phases.get(phase, 0.0), row[f"time/{phase}_seconds"]) for phase in PHASES]
            table.add_row(name, *(f"{one:.2f} / {other:.2f}" for one, other in [pairs[name], *cells]))
        console.print(table)
        summary(size, pairs, console)


def summary(size: str, pairs: Mapping[str, tuple[float, float]], console: Console) -> None:
    winner = min(pairs, key=lambda name: pairs[name][0])
    best = min(pairs, key=lambda name: pairs[name][1])
    over = pairs[winner][1] / pairs[best][1] - 1
    console.print(
        f"{size}: Kendall's tau {kendall(list(pairs.values())):.3f} over {len(pairs)} layouts; the predicted winner, "
        f"{winner}, takes {over:.1%} more than the measured best, {best}\n",
        highlight=False,
    )


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """(pairs in the same order - pairs in the other) / all pairs."""
    signs = [((a > b) - (a < b)) * ((x > y) - (x < y)) for (a, x), (b, y) in combinations(pairs, 2)]
    return sum(signs) / len(signs)


if __name__ == "__main__":
    main()
