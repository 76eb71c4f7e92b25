"""Train with the engine on the actor's memory; after every hand-off compare the engine with HuggingFace.

torchrun --nproc-per-node N -m tests.distributed.handoff_worker TP CHECKPOINTS PROMPTS OUT
"""

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hybridflow.batch import RolloutBatch, offsets
from hybridflow.config import ExperimentConfig
from hybridflow.parallel import platform as platforms
from hybridflow.recording.recorder import Recorder
from hybridflow.roles.base import Role
from hybridflow.trainers.online import OnlineTrainer
from tests.distributed.engine_weights import differs_from_export, wrong_parameters
from tests.distributed.gather import whole

NUM_ITERATIONS = 5
NUM_PROMPTS = 8  # of an iteration, and of each check
BLOCK = 128  # tokens of a KV cache block: only prompts that fill one are looked up in the prefix cache
MAX_PROMPT_LENGTH = 160
FROZEN = gc.get_freeze_count()  # by those who started this process


def main(tp: int, checkpoints: Path, prompts: Path, out: Path) -> None:
    results: dict[str, list] = {}
    for family, dtype in (("llama", "float32"), ("qwen2", "float32"), ("llama", "bfloat16")):
        trainer = OnlineTrainer(config(tp, checkpoints / family, prompts, dtype))
        results[f"{family}-{dtype}"] = run(trainer, checkpoints / family / "policy", dtype)
        if dtype == "bfloat16":
            results["differs_from_export"] = differs_from_export(trainer, out.with_suffix(".export"))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, results)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(everyone))
    platforms.stop()


def config(tp: int, models: Path, prompts: Path, dtype: str) -> ExperimentConfig:
    def role(name: str, **fields) -> dict:
        return {"model": str(models / name), "dtype": dtype, "tensor_parallel_size": tp, **fields}

    return ExperimentConfig.model_validate(
        {
            "name": "handoff",
            "num_iterations": NUM_ITERATIONS,
            "data": {
                "train": str(prompts),
                "prompts_per_iteration": NUM_PROMPTS,
                "max_prompt_length": MAX_PROMPT_LENGTH,
            },
            "sampling": {"max_response_length": 12},
            "actor": role("policy", optimizer={"lr": 1e-2}),
            "critic": role("critic", optimizer={"lr": 1e-2}),
            "reference": role("reference"),
            "reward": {"models": [role("reward")]},
            "rollout": {"kv_cache_gib": 0.03125},
            "algorithm": {"update": {"mini_batch_size": 4}},
        }
    )


def run(trainer: OnlineTrainer, model: Path, dtype: str) -> list[dict]:
    """One record before training and one after each iteration."""
    records = [check(trainer, model, dtype)]
    for iteration in range(1, NUM_ITERATIONS + 1):
        done = trainer.iterate(iteration, NUM_ITERATIONS, Recorder())
        records.append(check(trainer, model, dtype) | {"metrics": {k: float(v) for k, v in done.metrics.items()}})
    return records


def check(trainer: OnlineTrainer, model: Path, dtype: str) -> dict:
    """Greedy tokens of the engine against HuggingFace's with the trainer's current weights, and what memory holds."""
    before = {name: tensor.clone() for name, (_, tensor) in trainer.roles.actor.weights().items()}
    prompts = trainer.inputs.train.batch(list(range(NUM_PROMPTS)))
    responses = trainer.source.engine.greedy_responses(prompts)
    restored = all(torch.equal(before[name], tensor) for name, (_, tensor) in trainer.roles.actor.weights().items())
    del before
    log_probs = trainer.exchange.gather(trainer.roles.actor.log_probs(responses))
    difference = (log_probs - responses.rollout_log_probs).abs().max()
    record = {"restored": restored, "log_prob_difference": float(difference), "copies": weight_copies(trainer)}
    record["num_cached"] = sum(length > BLOCK for length in prompts.lengths.tolist())
    weights = whole(trainer.roles.actor, lambda p: p.data)
    if dtype == "float32":
        record["right"] = equal_to_huggingface(responses, model, weights)
    else:
        record["wrong_parameters"] = wrong_parameters(trainer)
    return record


def equal_to_huggingface(responses: RolloutBatch, model: Path, weights: dict[str, torch.Tensor]) -> list[bool]:
    """For each sequence, whether its response is what HuggingFace generates greedily."""
    reference = AutoModelForCausalLM.from_pretrained(model)
    reference.load_state_dict(weights, strict=not reference.config.tie_word_embeddings)
    starts, right = offsets(responses.lengths).tolist(), []
    for start, prompt, length in zip(
        starts, responses.prompt_lengths.tolist(), responses.lengths.tolist(), strict=True
    ):
        tokens = responses.input_ids[start : start + length]
        with torch.no_grad():
            generated = reference.generate(
                tokens[None, :prompt], do_sample=False, max_new_tokens=12, attention_mask=torch.ones(1, prompt)
            )[0]
        right.append(generated.tolist() == tokens.tolist())
    return right


def weight_copies(trainer: OnlineTrainer) -> int:
    """Bytes of live tensors shaped like a weight of the actor that belong to no role and no optimizer."""
    assert gc.get_freeze_count() <= FROZEN, "tensors that vLLM has frozen would not be seen"
    gc.collect()
    roles: list[Role] = [
        trainer.roles.actor,
        trainer.roles.critic,
        trainer.roles.reference,
        *trainer.roles.scorer.models,
    ]
    known = {p.data.untyped_storage().data_ptr() for role in roles for c in role.chunks for p in c.parameters()}
    for trained in (trainer.roles.actor.training_model, trainer.roles.critic.training_model):
        known |= {x.untyped_storage().data_ptr() for x in trained._gradients() + trained._optimizer_state()}
    shapes = {tuple(x.shape) for _, x in trainer.roles.actor.weights().values() if x.dim() == 2}
    sizes = {x.untyped_storage().nbytes() for _, x in trainer.roles.actor.weights().values()}  # the flat buffer
    found = {}
    for thing in gc.get_objects():
        if not isinstance(thing, torch.Tensor) or not thing.is_floating_point() or thing.is_meta:
            continue
        storage = thing.untyped_storage()
        alike = tuple(thing.shape) in shapes or tuple(thing.shape[::-1]) in shapes or storage.nbytes() in sizes
        if alike and storage.nbytes() and storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


if __name__ == "__main__":
    main(int(sys.argv[1]), *map(Path, sys.argv[2:]))
