"""One experiment by the names of tutorials: of directories, of models in memory, gone on, of the config that it left.

torchrun --nproc-per-node 2 -m tests.distributed.front_worker INPUTS OUT
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hybridflow import RLTrainer, create_critic_model, get_trainer_config, make_rl_data_loader
from hybridflow.errors import UserError
from hybridflow.parallel import platform as platforms
from hybridflow.parallel import torchrun
from tests.distributed.tiny_experiment import PROMPTS_PER_ITERATION

NUM_STEPS = 3
CONFIG = {  # what tests.distributed.tiny_experiment.write_config has
    **get_trainer_config(mixed_precision="no"),
    "batch_size": PROMPTS_PER_ITERATION,
    "mini_batch_size": 2,
    "rollout_len": 8,
    "lr": 1e-3,
    "epochs": 1,
    "seed": 1,
    "actor.tensor_parallel_size": 2,
    "rollout.kv_cache_gib": 0.0625,
    "metrics": {"tensorboard": False},
}


def main(inputs: Path, out: Path) -> None:
    loader = make_rl_data_loader(inputs / "train.jsonl", max_prompt_length=12, shuffle=False)
    same = {"algo": "ppo", "data_loader": loader, "config": CONFIG}
    record: dict[str, Any] = {}

    directories = RLTrainer(
        actor_model=str(inputs / "policy"),
        critic_model=create_critic_model(inputs / "critic"),
        reference_model=inputs / "reference",
        reward_model=str(inputs / "reward"),
        **same,
    )
    directories.fit(num_steps=NUM_STEPS, checkpoint_dir=out / "directories")
    directories.generator.engine.close()
    record["again"] = message(lambda: directories.fit(num_steps=4))
    record["load after fit"] = message(lambda: directories.load_checkpoint(out / "directories"))

    objects = RLTrainer(**in_memory(inputs), **same)
    objects.fit(num_steps=NUM_STEPS, checkpoint_dir=out / "objects")
    objects.generator.engine.close()
    record["left"] = sorted(path.name for path in out.iterdir())

    on = RLTrainer(**in_memory(inputs), **same)
    on.load_checkpoint(out / "objects")
    on.fit(num_steps=NUM_STEPS + 1, checkpoint_dir=out / "objects")
    on.generator.engine.close()

    step = out / "directories" / "checkpoints" / "step_000002"
    fork = RLTrainer.from_yaml(str(out / "directories" / "config.yaml"), ["name=fork", f"checkpoint.load={step}"])
    record["load by config"] = message(lambda: fork.load_checkpoint(step))
    record["directory by config"] = message(lambda: fork.fit(num_steps=3, checkpoint_dir=out / "fork"))
    fork.fit(num_steps=NUM_STEPS)
    fork.generator.engine.close()

    (out / "file").touch()
    nowhere = RLTrainer(**in_memory(inputs), **same)
    record["no directory"] = message(lambda: nowhere.fit(num_steps=1, checkpoint_dir=out / "file" / "run"))
    assert record["no directory"], "every rank is told"
    if torchrun.torchrun_rank()[0] == 0:
        (out / "record.json").write_text(json.dumps(record))
    platforms.stop()


def in_memory(inputs: Path) -> dict[str, Any]:
    """Of the second rank other models, which must not matter."""
    policy, reference = (AutoModelForCausalLM.from_pretrained(inputs / name) for name in ("policy", "reference"))
    critic, reward = (
        AutoModelForSequenceClassification.from_pretrained(inputs / name) for name in ("critic", "reward")
    )
    if torchrun.torchrun_rank()[0] == 1:
        for model in (policy, reference, critic, reward):
            for parameter in model.parameters():
                torch.nn.init.zeros_(parameter)
    return {
        "actor_model": policy,
        "critic_model": create_critic_model(critic),
        "reference_model": reference,
        "reward_model": reward,
        "tokenizer": AutoTokenizer.from_pretrained(inputs / "policy"),
    }


def message(call: Any) -> str:
    try:
        call()
    except UserError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
