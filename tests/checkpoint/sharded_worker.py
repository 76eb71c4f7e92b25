"""Roles of two replicas are saved; megatron's own dist_checkpointing, with nothing of ours, loads what was written: a
plain GPTModel at tensor-parallel size 2 its weights, and every rank all tensors whole.

torchrun --nproc-per-node 2 -m tests.checkpoint.sharded_worker MODELS OUT

Written for each checkpoint NAME: OUT/NAME/step_000001 (by `CheckpointWriter`), OUT/NAME/hf (by `export_huggingface`,
of actors), OUT/NAME/memory.pt (what the role had in memory), OUT/NAME/plain_N.pt (all tensors as megatron loads them),
OUT/NAME/rank_N.pt (parameters of the GPTModel) and expected_N.pt (of an actor in its place); OUT/errors_N.json: what
loading into the wrong role says.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async, state_dict_saver
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from torch import Tensor

from hybridflow.checkpoint.export import export_huggingface
from hybridflow.checkpoint.sharded import load
from hybridflow.checkpoint.state import RunState, SavedRun
from hybridflow.checkpoint.store import step_name
from hybridflow.checkpoint.writer import CheckpointWriter
from hybridflow.config import CheckpointConfig, ExperimentConfig
from hybridflow.errors import CheckpointError
from hybridflow.formats.distributed_directory import DistributedDirectory
from hybridflow.models.named_weights import named_weights
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import Grid, ProcessGroups
from hybridflow.parallel.layout import Layout
from hybridflow.placement.placed import place
from hybridflow.roles.base import RunContext, TrainedRole
from hybridflow.roles.objectives import value_loss
from hybridflow.roles.policy import Actor
from hybridflow.roles.values import Critic
from tests.architecture.weight_files_worker import plain_model
from tests.checkpoint.layouts import Case, experiment, layout
from tests.checkpoint.layouts_worker import BUCKET_BYTES, train
from tests.distributed.train_batch import make_train_batch

USES_CUDA = (filesystem_async, state_dict_saver, torch_strategy)  # loaded before megatron is adapted to the CPU
CASES = {  # name: actor; or critic, from the weights of a policy or of a critic
    "float32": ("actor", Case("llama", "dp2", "dp2")),
    "bfloat16": ("actor", Case("qwen2", "dp2", "dp2", dtype="bfloat16")),
    "sgd": ("actor", Case("llama", "dp2", "dp2", "sgd")),
    "critic of policy": ("policy", Case("llama", "dp2", "dp2", dtype="bfloat16")),
    "critic of critic": ("critic", Case("llama", "dp2", "dp2")),
}


class Roles:
    def __init__(self, models: Path) -> None:
        self._models = models
        platform = platforms.start(seed=0)
        self.platform, self.store = platform, platforms.fresh_store()
        self._world = RunContext(platform, ProcessGroups(), Exchange(dist.group.WORLD, platform.device), BUCKET_BYTES)

    def actor(self, case: Case, model: Path | None = None, **its_layout: Any) -> Actor:
        config = experiment(self._models / case.model, its_layout or layout(1, 1, None), case, all_ranks="0-1")
        if model is not None:
            config = changed(config, "actor", model=str(model))
        placed = place(config, self.platform.world_size)
        return Actor(placed.actor, temperature=1.0, world=self._world)

    def critic(self, case: Case, weights: str) -> Critic:
        config = experiment(self._models / case.model, layout(1, 1, None), case, all_ranks="0-1")
        config = changed(config, "critic", model=str(self._models / case.model / weights), dtype=case.dtype)
        return Critic(place(config, self.platform.world_size).models["critic"], world=self._world)

    def save(self, role: TrainedRole, root: Path) -> None:
        saver = CheckpointWriter(
            [role],
            root,
            CheckpointConfig(),
            config_yaml="",
            platform=self.platform,
            group=dist.group.WORLD,
            store=dist.PrefixStore(str(root), self.store),
        )
        saver.save(SavedRun(RunState(iteration=1), {}, {}, {}, None))


def changed(config: ExperimentConfig, section: str, **values: Any) -> ExperimentConfig:
    tree = config.model_dump(mode="json")
    return ExperimentConfig.model_validate(tree | {section: tree[section] | values})


def train_critic(critic: Critic) -> None:
    critic.begin_iteration(1, 1)
    critic.update(make_train_batch(), value_loss(None))


def memory_of(role: TrainedRole) -> dict[str, Tensor]:
    """Megatron's name -> weight, and "moment of NAME" -> what both replicas hold of it, as one."""
    own = {id(state.parameter): state for state in role.training_model.owned_states()}
    moments = sorted({name for state in own.values() for name in state.tensors})
    found = {}
    for weight, parameter in named_weights(role.chunks, role.spec, head=role.head):
        found[weight.megatron] = parameter.detach().clone()
        for name in moments:
            whole = torch.zeros(parameter.numel())
            if id(parameter) in own:
                state = own[id(parameter)]
                whole[state.start : state.stop] = state.tensors[name]
            dist.all_reduce(whole)
            found[f"{name} of {weight.megatron}"] = whole.view(parameter.shape)
    return found


def saved(roles: Roles, name: str, out: Path) -> TrainedRole:
    kind, case = CASES[name]
    role: TrainedRole
    if kind == "actor":
        role = actor = roles.actor(case)
        for _ in range(2):
            train(actor)
        (out / name).mkdir(parents=True, exist_ok=True)
        export_huggingface(actor, out / name / "hf")
    else:
        role = critic = roles.critic(case, kind)
        for _ in range(2):
            train_critic(critic)
    roles.save(role, out / name)
    memory = memory_of(role)
    if roles.platform.rank == 0:
        torch.save(memory, out / name / "memory.pt")
    return role


def loaded_by_megatron(roles: Roles, role: TrainedRole, name: str, out: Path) -> None:
    """Strategies and validation are megatron's defaults."""
    directory = out / name / step_name(1) / role.name
    torch.save(dist_checkpointing.load_plain_tensors(str(directory)), out / name / f"plain_{roles.platform.rank}.pt")
    if role.head != "lm":
        return
    grid = Grid.build(Layout(2, 1, 1, (0, 1)), ProcessGroups())
    model = plain_model(role.spec, grid)
    if role.dtype == "bfloat16":
        model.bfloat16()
    weights = model.sharded_state_dict(metadata={"dp_cp_group": grid.groups.dp_cp})
    model.load_state_dict(dist_checkpointing.load(weights, str(directory)))
    torch.save(dict(model.named_parameters()), out / name / f"rank_{roles.platform.rank}.pt")
    tp2 = roles.actor(CASES[name][1], model=out / name / "hf", **layout(2, 1, None))
    own = {weight.megatron: parameter for weight, parameter in named_weights(tp2.chunks, tp2.spec, head="lm")}
    torch.save(own, out / name / f"expected_{roles.platform.rank}.pt")


def error_of(act: Callable[[], object]) -> str | None:
    try:
        act()
    except CheckpointError as error:
        return str(error)
    return None


def errors(roles: Roles, out: Path) -> dict[str, str | None]:
    llama, qwen2 = Case("llama", "dp2", "dp2"), Case("qwen2", "dp2", "dp2")
    found = {
        "shape": (roles.actor(Case("deep", "dp2", "dp2")), "float32/step_000001/actor"),
        "dtype": (roles.actor(Case("llama", "dp2", "dp2", dtype="bfloat16")), "float32/step_000001/actor"),
        "optimizer": (roles.actor(llama), "sgd/step_000001/actor"),
        "biases": (roles.actor(qwen2), "float32/step_000001/actor"),
        "head": (roles.critic(llama, "critic"), "float32/step_000001/actor"),
        "no new momentum": (roles.actor(Case("llama", "dp2", "dp2", "momentum")), "sgd/step_000001/actor"),
    }
    return {
        name: error_of(lambda r=role, d=where: load(r, DistributedDirectory(out / d)))
        for name, (role, where) in found.items()
    }


def main(models: Path, out: Path) -> None:
    roles = Roles(models)
    made = {name: saved(roles, name, out) for name in CASES}
    platforms.adapt_megatron()
    parallel_state.destroy_global_memory_buffer()
    parallel_state.initialize_model_parallel(2, 1)  # the sharded state of tied embeddings reads it
    for name, role in made.items():
        loaded_by_megatron(roles, role, name, out)
    (out / f"errors_{roles.platform.rank}.json").write_text(json.dumps(errors(roles, out)))
    dist.barrier()
    platforms.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
