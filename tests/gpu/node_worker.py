"""What the ranks of `tests.gpu.node_steps` do, beside whole runs (`tests.gpu.speed_worker`).

torchrun --nproc-per-node N -m tests.gpu.node_worker model SHAPE DIRECTORY CHANGES
torchrun --nproc-per-node N -m tests.gpu.node_worker updates|updates_on_one_token CONFIG OUT
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hybridflow.batch import RolloutBatch, response_mask
from hybridflow.config import ExperimentConfig
from hybridflow.flows.of_algorithm import flow_of
from hybridflow.models.expert_dispatch import Arrived
from hybridflow.models.experts import Experts
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.device import uses_cuda
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.placement.placed import place
from hybridflow.roles.base import RunContext
from tests.distributed.gather import whole
from tests.distributed.given import given_roles, given_run
from tests.forks import ROOT
from tests.tiny_models import make_tokenizer

NUM_UPDATES = 2


def model(shape: str, directory: Path, changes: dict[str, Any]) -> None:
    """Random weights of a shape under configs/shapes. In a process of its own: what it takes of a GPU is given back."""
    published = json.loads((ROOT / "configs" / "shapes" / shape / "config.json").read_text())
    config = AutoConfig.for_model(**published | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3} | changes)
    with torch.device("cuda" if uses_cuda() else "cpu"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)


def updates(config: ExperimentConfig, *, one_token: bool = False) -> dict[str, Any]:
    """Of two updates on given responses: metrics and log-probs of each, how the weights have changed, and the fewest
    rows that the experts of a rank had in a layer and pass."""
    platform = platforms.start(seed=0)
    exchange = Exchange(dist.group.WORLD, platform.device)
    world = RunContext(platform, ProcessGroups(), exchange, place(config, platform.world_size).bucket_bytes)
    roles = given_roles(config, world)
    actor = roles.actor
    given = responses(config, actor.spec.vocab_size, one_token=one_token)
    run, book = given_run(config, given, world, roles=roles)
    rows = list[Tensor]()
    for module in (module for chunk in actor.chunks for module in chunk.modules() if isinstance(module, Experts)):
        module.register_forward_pre_hook(lambda module, given: rows.append(num_rows(module, given[0])))
    before, metrics, log_probs = whole(actor, lambda p: p.data), [], []
    for number in range(1, NUM_UPDATES + 1):
        book.begin(run, number, NUM_UPDATES)
        done = book.finished(run, flow_of(config.algorithm)(run))
        metrics.append({name: float(x) for name, x in done.metrics.items()})
        log_probs.append(done.batch.log_probs[given.response_mask])
    actor.weights()  # they may still be under way
    after = whole(actor, lambda p: p.data)
    fewest: list[Any] = [None] * platform.world_size
    dist.all_gather_object(fewest, int(torch.stack(rows).min()) if rows else -1)
    changes = {name: x - before[name] for name, x in after.items()}
    return {"metrics": metrics, "log_probs": torch.stack(log_probs), "changes": changes, "fewest": min(fewest)}


def num_rows(experts: Experts, arrived: Arrived) -> Tensor:
    return ((arrived.experts >= 0) & (arrived.experts < experts.num_held)).sum()


def responses(config: ExperimentConfig, vocab_size: int, *, one_token: bool) -> RolloutBatch:
    """Of unlike lengths; the samples of a prompt share it. one_token: all tokens are the same, and go one way."""
    generator = torch.Generator().manual_seed(3)
    num_prompts, samples = config.data.prompts_per_iteration, config.sampling.samples_per_prompt
    prompt, most = config.data.max_prompt_length, config.sampling.max_response_length

    def drawn(length: int) -> Tensor:
        return torch.randint(4, 5 if one_token else vocab_size, (length,), generator=generator)

    prompts, pieces = [drawn(prompt) for _ in range(num_prompts)], []
    for row in range(num_prompts * samples):
        pieces.append(torch.cat([prompts[row // samples], drawn(most - 3 * row % (most // 2))]))
    lengths = torch.tensor([len(piece) for piece in pieces])
    starts, tokens = torch.full_like(lengths, prompt), torch.cat(pieces)
    indices, cut = torch.arange(len(pieces)) // samples, torch.zeros(len(pieces), dtype=torch.bool)
    mask = response_mask(lengths, starts)
    return RolloutBatch(tokens, lengths, starts, indices, cut, mask, torch.zeros(len(tokens)))


def main(kind: str, *arguments: str) -> None:
    if kind == "model":
        return model(arguments[0], Path(arguments[1]), json.loads(arguments[2]))
    found = updates(ExperimentConfig.from_yaml(arguments[0]), one_token=kind == "updates_on_one_token")
    if dist.get_rank() == 0:
        torch.save(found, arguments[1])
    platforms.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
