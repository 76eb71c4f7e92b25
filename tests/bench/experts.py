"""An iteration of a mixture of experts, by how its experts are cut over two ranks: the same model, in one run.

    python -m tests.bench.experts [--rounds 3] [--iterations 6]

    shares      each rank has half of every expert, with tensor parallelism 2
    whole       each rank has half of the experts whole, with tensor parallelism 2: no message more
    replicas    two replicas of one rank share the experts: tokens are sent to them and back

GRPO of a Qwen3-MoE with random weights, 16 experts of 192 columns, 4 a token; responses of one length. The runs take
turns. Seconds are those of metrics.csv, without each run's first iteration.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from tests.tiny_models import VOCAB_SIZE, make_prompts, make_tokenizer

CUTS = {
    "shares": {"tensor_parallel_size": 2},
    "whole": {"tensor_parallel_size": 2, "expert_parallel_size": 2},
    "replicas": {"expert_parallel_size": 2},
}
PHASES = {name: f"time/{name}_seconds" for name in ("iteration", "generate", "log_probs", "actor_update")}


def make_model(directory: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=192,
        norm_topk_prob=True,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)


def config_of(cut: str, root: Path, iterations: int) -> str:
    sizes = "".join(f"  {key}: {value}\n" for key, value in CUTS[cut].items())
    return f"""
name: {cut}
seed: 1
num_iterations: {iterations}
output_dir: {root / "runs"}
data: {{train: {root / "prompts.jsonl"}, prompts_per_iteration: 16, max_prompt_length: 64}}
sampling: {{samples_per_prompt: 4, max_response_length: 64, ignore_eos: true}}
actor:
  model: {root / "model"}
  dtype: float32
{sizes}  optimizer: {{lr: 1.0e-5}}
reward: {{functions: [{{function: hybridflow.rewards:exact_match}}]}}
rollout: {{kv_cache_gib: 0.25}}
algorithm: {{name: grpo, update: {{mini_batch_size: 32}}, kl: {{use: none}}}}
metrics: {{tensorboard: false}}
"""


def run(cut: str, root: Path, iterations: int) -> dict[str, float]:
    """Mean seconds of each phase, without the first iteration."""
    file = root / f"{cut}.yaml"
    file.write_text(config_of(cut, root, iterations))
    command = [sys.executable, "-m", "hybridflow", "train", str(file), "--nproc", "2", "--resume", "never"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{cut}: status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    with (root / "runs" / cut / "metrics.csv").open() as rows:
        measured = list(csv.DictReader(rows))[1:]
    return {name: statistics.mean(float(row[key]) for row in measured) for name, key in PHASES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=6)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {cut: [] for cut in CUTS}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        make_model(root / "model")
        make_prompts(root / "prompts.jsonl", 64)
        for number in range(options.rounds):
            for cut in CUTS:
                found[cut].append(run(cut, root, options.iterations))
                seconds = ", ".join(f"{name} {value:.2f} s" for name, value in found[cut][-1].items())
                print(f"round {number + 1}, {cut}: {seconds}", flush=True)
    medians = {
        cut: {name: statistics.median(one[name] for one in each) for name in PHASES} for cut, each in found.items()
    }
    for cut, seconds in medians.items():
        shown = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
        print(f"{cut}: {shown}; {seconds['iteration'] / medians['shares']['iteration']:.2f} of shares")


if __name__ == "__main__":
    main()
