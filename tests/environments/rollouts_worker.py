"""One trainer after the other, each with another environment; their run directories stay, and what went wrong as JSON.

python -m tests.environments.rollouts_worker CONFIG OUT CASE ...
"""

import json
import sys
from pathlib import Path
from typing import Any

from hybridflow.config import ExperimentConfig
from hybridflow.errors import OfAnotherRank, UserError
from hybridflow.parallel import platform as platforms
from hybridflow.parallel import torchrun
from hybridflow.trainers.online import OnlineTrainer

USERS = "tests.environments.classes_of_users"
PPO = "algorithm={name: ppo, kl: {use: none}, update: {mini_batch_size: 8}}"
SAMPLED = "sampling={samples_per_prompt: 4, max_response_length: 96}"
DYNAMIC = "algorithm.dynamic_sampling={max_generation_rounds: 2}"


def named(name: str, **more: Any) -> str:
    return "data.environment=" + json.dumps({"class": f"{USERS}:{name}", **more})


TALK = {"max_turn_tokens": 16, "max_turns": 5}
LATER = named("FailsAt", arguments={"number": 5}, on_error="end_run", **TALK)  # in the second iteration
ONE = "actor.tensor_parallel_size=1"
CASES = {
    "talk": [named("Talk", **TALK)],
    "talk again": [named("Talk", **TALK)],
    "talk at tp 2": [named("Talk", arguments={"delay": 0.05}, **TALK), "actor.tensor_parallel_size=2"],
    "talk at pp 2": [named("Talk", arguments={"delay": 0.05}, **TALK), ONE, "rollout.pipeline_parallel_size=2"],
    "talk at dp 2": [named("Talk", arguments={"delay": 0.05}, **TALK), ONE],
    "reinforce": [named("Talk", **TALK), "algorithm={name: reinforce, kl: {use: none}, update: {mini_batch_size: 8}}"],
    "never done": [named("NeverDone", max_turns=3, max_turn_tokens=8), SAMPLED, "num_iterations=1"],
    "no tokens left": [named("NeverDone", max_turns=50, max_turn_tokens=8), SAMPLED, "num_iterations=1"],
    "fragile": [named("Fragile", max_turn_tokens=8, call_seconds=10, num_workers=24), "num_iterations=1"],
    "fragile ends": [named("Fragile", max_turn_tokens=8, call_seconds=10, on_error="end_run"), "num_iterations=1"],
    "later at tp 2": [LATER, "actor.tensor_parallel_size=2"],
    "later at dp 2": [LATER, ONE],
    "row time": [named("Talk", arguments={"delay": 5.0}, row_seconds=0.2, max_turn_tokens=8), "num_iterations=1"],
    "rollout time": [named("Sleeps", rollout_seconds=6.0, num_workers=16, max_turn_tokens=8), "num_iterations=1"],
    "parts": [named("Parts", parts={"right": 0.5, "short": 1.0}, max_turn_tokens=8)],
    "ppo": [named("Talk", **TALK), PPO, "critic={model: CRITIC, dtype: float32, optimizer: {lr: 0.001}}"],
    "dynamic": [named("Talk", **TALK), DYNAMIC],
    "evaluated": [named("Talk", **TALK), "metrics.eval_interval=1", "num_iterations=1"],
    "wrong parser": [named("Talk", tool_parser="nobody's")],
}


def main(config: Path, out: Path, names: list[str]) -> None:
    critic = str(config.parent / "critic")
    run(config, out, {name: [override.replace("CRITIC", critic) for override in CASES[name]] for name in names})


def run(config: Path, out: Path, cases: dict[str, list[str]]) -> None:
    """cases: overrides by name."""
    told = {}
    for name, own in cases.items():
        try:
            overrides = [f"name={name.replace(' ', '_')}", *own]
            trainer = OnlineTrainer(ExperimentConfig.from_yaml(config, overrides))
            try:
                trainer.fit()
            finally:
                trainer.generator.engine.close()
            told[name] = ""
        except (UserError, OfAnotherRank) as error:
            told[name] = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    if torchrun.torchrun_rank()[0] == 0:
        out.write_text(json.dumps(told))
    platforms.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
