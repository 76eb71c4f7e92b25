"""The first hour on a node of 8 GPUs: what each step does, and what it looks at. `tests.gpu.node` runs them.

python -m tests.gpu.node_steps STEP FOLDER [--tiny]     a line of FOLDER/STEP.jsonl for each figure that is there

--tiny: the same on CPUs, with tiny models in float32. Rates are told, never judged. In float32 NVIDIA's products take
all bits. Figures of one H100 are those of docs/explanation/gpus.md, of 2026-11-27.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from tests import launch
from tests.forks import ROOT
from tests.gpu.kernel_parts import Line
from tests.gpu.parts import _beside

NUM_RANKS = 8
STACKS_SECONDS = 60  # before the end of a step, for those of 8 ranks
EXACT = {"NVIDIA_TF32_OVERRIDE": "0"}
LLAMA, QWEN, MIXTURE = "llama-3.2-1b", "qwen3-8b", "qwen3-30b-a3b"
Figures = Iterator[Line]
Found = dict[str, Any]


class Rows(NamedTuple):
    prompts: int
    samples: int
    prompt: int
    response: int


FEW, MANY, LONG = Rows(16, 4, 128, 256), Rows(64, 8, 128, 256), Rows(2, 4, 128, 32640)
IN_SMALL = {FEW: Rows(8, 2, 8, 8), MANY: Rows(8, 2, 8, 8), LONG: Rows(2, 4, 8, 56)}

TINY = {"hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 100, "head_dim": 32}
TINY |= {"num_attention_heads": 8, "num_key_value_heads": 4, "initializer_range": 0.15}
FEW_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


class Node:
    """Models, configs and launches of one step, which is to end after so many seconds."""

    def __init__(self, folder: Path, *, tiny: bool, seconds: float) -> None:
        self.folder, self.tiny, self._until = folder, tiny, time.monotonic() + seconds

    def ranks(self, num_ranks: int, worker: str, *arguments: object, **environment: str) -> None:
        launch.SECONDS = max(1.0, self._until - time.monotonic())  # ranks that hang then print their stacks
        launch.run_ranks(num_ranks, f"tests.gpu.{worker}", *arguments, environment=environment)

    def model(self, shape: str, **changes: object) -> str:
        path, small = self.folder / shape, TINY | (FEW_EXPERTS if shape == MIXTURE else {})
        self.ranks(1, "node_worker", "model", shape, path, json.dumps(small if self.tiny else changes))
        return str(path)

    def config(self, name: str, model: str, given: Rows, actor: dict[str, Any], **sections: Any) -> Path:
        """GRPO whose loss has a gradient whatever the scores are. sections: over those here, key by key."""
        rows, train = IN_SMALL[given] if self.tiny else given, self.folder / f"{name}.jsonl"
        texts = ["".join(str((row * i + i // 7) % 10) for i in range(rows.prompt)) for row in range(rows.prompts)]
        train.write_text("".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in texts))
        trained = {"model": model, "optimizer": {"lr": 1e-3, "eps": 1e-3}, **actor}
        config: dict[str, Any] = {
            "name": name,
            "output_dir": str(self.folder),
            "num_iterations": 2 if self.tiny else 3,
            "data": {"train": str(train), "prompts_per_iteration": rows.prompts, "max_prompt_length": rows.prompt},
            "sampling": {"samples_per_prompt": rows.samples, "max_response_length": rows.response, "ignore_eos": True},
            "actor": {"dtype": "bfloat16", "micro_batch_tokens": max(4096, rows.prompt + rows.response)} | trained,
            "reward": {"functions": [{"function": "tests.distributed.reward_functions:response_length"}]},
            "algorithm": {"name": "grpo", "kl": {"use": "none"}, "policy": {"entropy_coef": 0.01}},
            "metrics": {"tensorboard": False},
            "rollout": {},
        }
        config |= {key: config[key] | x if isinstance(x, dict) else x for key, x in sections.items()}
        if self.tiny:
            config["actor"] |= {"dtype": "float32", "micro_batch_tokens": 64}
            config["rollout"]["kv_cache_gib"] = 1 / 64
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(config))
        return path

    def worker(self, kind: str, num_ranks: int, config: Path) -> Found:
        out = config.with_suffix(".pt")
        self.ranks(num_ranks, "node_worker", kind, config, out, **EXACT)
        found: Found = torch.load(out)
        return found

    def run(self, config: Path, **environment: str) -> Found:
        """Of a whole run on all ranks: `tests.gpu.speed_worker`."""
        out = config.with_suffix(".json")
        self.ranks(NUM_RANKS, "speed_worker", "run", config, out, **environment)
        found: Found = json.loads(out.read_text())
        return found


def links(node: Node) -> Figures:
    """`hybridflow health` with a config, of which it makes all groups and tells what these take."""
    layout, path = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, node.folder / "health.json"
    config = node.config("groups", node.model(LLAMA), FEW, layout, rollout={"tensor_parallel_size": 2})
    launch.torchrun(NUM_RANKS, "-m", "hybridflow.health", config, "--json", path, check=False)
    findings = json.loads(path.read_text())["findings"]
    bad = [f"{each['area']}, {each['name']}: {each['value']}" for each in findings if each["status"] == "fail"]
    yield Line("health", "; ".join(bad) or f"{len(findings)} lines, none fails", not bad)
    rates = [each for each in findings if each["name"] == "link" and each["figures"]]
    slowest = min(rates, key=lambda each: each["figures"]["bytes_per_second"])
    yield Line(f"slowest of {len(rates)} links", f"{slowest['host']}: {slowest['value']}")
    for each in findings:
        if each["area"] == "groups":
            yield Line(f"groups, {each['name']}", each["value"])


def dense(node: Node) -> Figures:
    """Two updates in float32 of tp 2, pp 2, dp 2 against one rank, with exchanges under way while ranks compute."""
    model = node.model(LLAMA)
    one = node.worker("updates", 1, node.config("one", model, FEW, {"dtype": "float32"}))
    for overlap in (True, False):
        layout = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "dtype": "float32", "overlap": overlap}
        found = node.worker("updates", NUM_RANKS, node.config(f"overlap_{overlap}", model, FEW, layout))
        yield from compared(f"overlap {overlap}", one, found)


def compared(name: str, one: Found, other: Found, most: float = 1e-3, *, weights: bool = True) -> Figures:
    """most: relative, of what both updates show; of log-probs the mean difference. Adam's steps are less alike."""
    for metric in ("actor/loss", "actor/grad_norm"):
        pairs = [(a[metric], b[metric]) for a, b in zip(one["metrics"], other["metrics"], strict=True)]
        right = all(abs(a - b) <= most * max(abs(a), abs(b)) for a, b in pairs)
        yield Line(f"{name}, {metric}", ", ".join(f"{b:.6g} (one rank {a:.6g})" for a, b in pairs), right)
    apart = (one["log_probs"] - other["log_probs"]).abs()
    value = f"mean {apart.mean():.1e}, largest {apart.max():.1e} apart from one rank"
    yield Line(f"{name}, log-probs", value, bool(apart.mean() <= most))
    if weights:
        assert one["changes"].keys() == other["changes"].keys()
        largest = max(float(x.abs().max()) for x in one["changes"].values())
        far = max(float((x - other["changes"][key]).abs().max()) for key, x in one["changes"].items()) / largest
        value = f"{far:.1e} apart, relative to the largest, {largest:.1e}"
        yield Line(f"{name}, changes of weights", value, 0 < largest and far <= 10 * most)
    seconds, alone = (found["metrics"][-1]["time/actor_update_seconds"] for found in (other, one))
    yield Line(f"{name}, update", f"{seconds:.2f} s (one rank {alone:.2f})")


def engines(node: Node) -> Figures:
    """Engines of one rank, then of two: sums by vLLM's kernel, by NCCL, by FlashInfer where it is installed. A run
    compares the tokens of an engine's ranks itself, and ends where they differ."""
    model, off = node.model(LLAMA), {"engine_arguments": {"disable_custom_all_reduce": True}}
    ways: dict[str, tuple[int, dict[str, Any], dict[str, str]]] = {
        "tp1 x 8": (1, {}, {}),
        "tp2 x 4": (2, {}, {}),
        "tp2 x 4, disable_custom_all_reduce": (2, off, {}),
        "tp2 x 4, VLLM_ALLREDUCE_USE_FLASHINFER": (2, {}, {"VLLM_ALLREDUCE_USE_FLASHINFER": "1"}),
    }
    for number, (name, (tp, rollout, environment)) in enumerate(ways.items()):
        rollout = {"tensor_parallel_size": tp, **rollout}
        config = node.config(f"engines_{number}", model, MANY, {"tensor_parallel_size": tp}, rollout=rollout)
        yield from generated(node, name, node.run(config, **environment))


def generated(node: Node, name: str, found: Found) -> Figures:
    metrics = found["metrics"]
    yield _log_probs(node, name, metrics)
    rate = metrics["rollout/throughput_tokens_per_sec"]
    yield _beside(f"{name}, generation of all ranks", f"{rate:,.0f} tokens/s", "29,100 tokens/s of one")
    yield _beside(f"{name}, engine step", f"{found['step ms']:.2f} ms", "9.0 ms of 256 rows")
    value = f"{found['wake ms']:.0f} and {found['sleep ms']:.0f} ms"
    yield _beside(f"{name}, wake and sleep", value, "27 to 33 and 17 to 26 ms")
    yield Line(f"{name}, bytes lost in five wakes and sleeps", f"{found['lost bytes']:+,}", found["lost bytes"] == 0)


def _log_probs(node: Node, name: str, metrics: dict[str, float]) -> Line:
    """Of the engine and the trainer, after an update."""
    metric, most = ("rollout/log_prob_diff_max", 1e-4) if node.tiny else ("rollout/log_prob_diff_mean", 0.05)
    return _beside(f"{name}, {metric}", f"{metrics[metric]:.1e}", "mean 0.008 to 0.016", right=metrics[metric] < most)


def hand_off(node: Node) -> Figures:
    """Weights of tp 4, dp 2 gathered for engines of tp 2; tokens against engines that have the trainer's own."""
    model, found = node.model(LLAMA), {}
    for name, tp in (("in place", 2), ("gathered", 4)):
        rollout = {"tensor_parallel_size": 2}
        config = node.config(f"from_tp{tp}", model, MANY, {"tensor_parallel_size": tp}, rollout=rollout)
        found[name] = node.run(config)
        metrics = found[name]["metrics"]
        yield _log_probs(node, name, metrics)
        kinds = ("received", "sent", "permuted")
        moved = ", ".join(f"{kind} {metrics[f'reshard/bytes_{kind}']:,.0f}" for kind in kinds)
        value = f"{1e3 * metrics['reshard/seconds']:.1f} ms; bytes {moved}"
        yield _beside(f"{name}, hand-off", value, "2.1 to 3.4 ms for 403 MB permuted")
    pairs = list(zip(found["in place"]["tokens"], found["gathered"]["tokens"], strict=True))
    same = sum(a == b for a, b in pairs) / len(pairs)
    yield Line("tokens of the first iteration that both engines have", f"{same:.1%} of {len(pairs):,}", same > 0.9)


def mixture(node: Node) -> Figures:
    """Tokens that travel to experts of 8 ranks, against one rank; then all alike, which leave ranks without any."""
    model = node.model(MIXTURE, num_hidden_layers=2)
    dispatched = {"expert_parallel_size": NUM_RANKS, "token_dispatcher": "alltoall", "dtype": "float32"}
    for kind, name in (("updates", "ep 8"), ("updates_on_one_token", "ep 8, one token")):
        config = node.config(f"{kind}_one", model, FEW, {"dtype": "float32"})
        one = node.worker(kind, 1, config)
        other = node.worker(kind, NUM_RANKS, node.config(kind, model, FEW, dispatched))
        yield from compared(name, one, other)
        fewest, wanted = other["fewest"], kind == "updates_on_one_token"
        yield Line(f"{name}, fewest rows of a rank in a pass", str(fewest), (fewest == 0) or not wanted)


def context(node: Node) -> Figures:
    """Long rows cut over 2 and 4 ranks, against one rank."""
    model = node.model(LLAMA)
    one = node.worker("updates", 1, node.config("one", model, LONG, {"recompute": "full"}))
    for cp in (2, 4):
        layout = {"context_parallel_size": cp, "recompute": "full"}
        found = node.worker("updates", NUM_RANKS, node.config(f"cp{cp}", model, LONG, layout))
        yield from compared(f"cp {cp}", one, found, 1e-3 if node.tiny else 0.03, weights=node.tiny)


def larger(node: Node) -> Figures:
    """GRPO of an 8B shape, with segments of memory that grow and without."""
    model, layout = node.model(QWEN), {"tensor_parallel_size": 2, "sequence_parallel": True, "recompute": "selective"}
    for expandable in (False, True):
        name, iterations = f"expandable segments {expandable}", 2 if node.tiny else 4
        keys = {"expandable_segments": expandable, "num_iterations": iterations}
        config = node.config(name.replace(" ", "_"), model, MANY, layout, rollout={"tensor_parallel_size": 2}, **keys)
        yield from iterated(node, name, node.run(config)["metrics"], "8.5 s, MFU 50.7 % of 1B")


def iterated(node: Node, name: str, metrics: dict[str, float], h100: str) -> Figures:
    """Of the second iteration."""
    yield _log_probs(node, name, metrics)
    mfu = metrics.get("speed/actor_update_mfu")
    value = f"{metrics['time/iteration_seconds']:.2f} s" + (f", MFU of the update {mfu:.1%}" if mfu else "")
    yield _beside(f"{name}, iteration", value, h100)
    for kind, unit in (("time", "seconds"), ("memory", "mb")):
        own = {key.split("/")[1]: x for key, x in metrics.items() if key.startswith(kind) and key.endswith(unit)}
        value = ", ".join(f"{key.removesuffix('_' + unit)} {x:.4g}" for key, x in own.items() if x)
        yield Line(f"{name}, {kind} in {unit}", value)


def largest(node: Node) -> Figures:
    """Two iterations of the shipped config for one node, with random weights and shorter rows."""
    shipped = yaml.safe_load((ROOT / "configs" / "qwen3_30b_a3b_8gpus.yaml").read_text())
    actor = shipped["actor"] | {"model": node.model(MIXTURE)}
    config = node.config("largest", actor["model"], MANY, actor, rollout=shipped["rollout"], num_iterations=2)
    yield from iterated(node, "30B-A3B", node.run(config)["metrics"], "update 0.88 s, MFU 23.6 % of 2.7 B")


STEPS: dict[str, tuple[Callable[[Node], Figures], float]] = {  # and its minutes at most
    "links": (links, 8),
    "dense": (dense, 10),
    "engines": (engines, 15),
    "hand_off": (hand_off, 8),
    "mixture": (mixture, 10),
    "context": (context, 10),
    "larger": (larger, 12),
    "largest": (largest, 15),
}


def main(name: str, folder: Path, *, tiny: bool) -> None:
    step, minutes = STEPS[name]
    with (folder / f"{name}.jsonl").open("w") as file:
        for line in step(Node(folder, tiny=tiny, seconds=60 * minutes - STACKS_SECONDS)):
            print(json.dumps(line), file=file, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), tiny="--tiny" in sys.argv)
