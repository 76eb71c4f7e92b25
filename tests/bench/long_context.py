"""A rank's memory and the seconds of an iteration with long sequences, as `hybridflow plan` has them: a table.

    python -m tests.bench.long_context [--gpus 8 32]

GRPO of Qwen3-8B and Qwen3-30B-A3B on H100s of 80 GB, 16 prompts of 8 responses an iteration, all as long as may be.
Both models have YaRN with factor 4, as their publishers say for more than 32,768 tokens. Nothing is run.
"""

import argparse
import contextlib
import io
import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import yaml

from hybridflow.cli.plan import main as plan

SHAPES = Path(__file__).resolve().parents[2] / "configs" / "shapes"
TOKENS, PROMPT = (32768, 65536, 131072), 2048
MODELS = {
    "qwen3-8b": {"tensor_parallel_size": 2},
    "qwen3-30b-a3b": {"tensor_parallel_size": 2, "expert_parallel_size": 8, "token_dispatcher": "alltoall"},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
HEADERS = (
    "model",
    "GPUs",
    "tokens",
    "cp",
    "GiB in training",
    "activations",
    "sequences",
    "s generation",
    "s log-probs, update",
)


def config_of(model: Path, sizes: dict[str, Any], tokens: int, cp: int) -> dict[str, Any]:
    actor = {
        **sizes,
        "model": str(model),
        "sequence_parallel": True,
        "context_parallel_size": cp,
        "recompute": "full",
        "micro_batch_tokens": tokens,
        "optimizer": {"lr": 1e-6},
        "offload_optimizer": True,
        "offload_gradients": True,
    }
    return {
        "name": "long",
        "seed": 1,
        "num_iterations": 1,
        "data": {"train": "prompts.jsonl", "prompts_per_iteration": 16, "max_prompt_length": PROMPT},
        "sampling": {"samples_per_prompt": 8, "max_response_length": tokens - PROMPT},
        "actor": actor,
        "reward": {"functions": [{"function": "hybridflow.rewards:numeric_match"}]},
        "algorithm": {"name": "grpo", "kl": {"use": "none"}},
    }


def planned(root: Path, config: dict[str, Any], gpus: int) -> dict[str, Any] | None:
    """None where no rank's memory suffices."""
    file, out = root / "config.yaml", io.StringIO()
    file.write_text(yaml.safe_dump(config))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        status = plan([str(file), "--json", "--time", "--world-size", str(gpus), "--profile", "h100-sxm"])
    return json.loads(out.getvalue()) if status == 0 else None


def seconds_of(phases: list[dict[str, Any]], name: str) -> float:
    return sum(each["seconds"] for each in phases if each["phase"] == name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 32])
    options = parser.parse_args()
    print("|", " | ".join(HEADERS), "|")
    print("|", " | ".join("---" for _ in HEADERS), "|", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for name, sizes in MODELS.items():
            tree = json.loads((SHAPES / name / "config.json").read_text())
            model = root / name
            model.mkdir()
            longer = {"rope_scaling": YARN, "max_position_embeddings": max(TOKENS)}
            (model / "config.json").write_text(json.dumps(tree | longer))
            for gpus, tokens, cp in itertools.product(options.gpus, TOKENS, (1, 2, 4)):
                found = planned(root, config_of(model, sizes, tokens, cp), gpus)
                cells: list[Any] = ["does not fit", "", "", "", ""]
                if found is not None:
                    held, seconds = found["memory"]["training"]["worst_rank"], found["time"]["phases"]
                    cells = [f"{held[key] / 2**30:.1f}" for key in ("total", "activations")]
                    cells.append(found["kv_cache"]["longest_sequences"])
                    of_actor = sum(seconds_of(seconds, each) for each in ("log_probs", "actor_update"))
                    cells += [f"{seconds_of(seconds, 'generate'):.0f}", f"{of_actor:.0f}"]
                print("|", " | ".join(map(str, (name, gpus, f"{tokens:,}", cp, *cells))), "|", flush=True)


if __name__ == "__main__":
    main()
