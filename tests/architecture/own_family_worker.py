"""The family whose entry docs/extend/model-family.md shows: logits, two PPO iterations, conversion there and back.

torchrun --nproc-per-node 2 -m tests.architecture.own_family_worker CHECKPOINTS PROMPTS OUT

CHECKPOINTS/own holds policy, reference, reward and critic.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from hybridflow.architecture import families
from hybridflow.architecture.spec import ARCHITECTURES, architectures
from hybridflow.convert.to_huggingface import to_huggingface
from hybridflow.convert.to_megatron import to_megatron
from hybridflow.parallel import platform as platforms
from tests.distributed.families_worker import LAYOUTS, ROLLOUTS, logits, once, two_iterations
from tests.distributed.ppo_worker import config
from tests.pages import DOCS, blocks_of

[ENTRY] = [block.text for block in blocks_of(DOCS / "extend" / "model-family.md") if "Family(" in block.text]


def main(checkpoints: Path, prompts: Path, out: Path) -> None:
    entry = eval("{" + ENTRY + "}", vars(families))
    families.BY_NAME.update({family.name: family for family in entry.values()})
    families.FAMILIES.update(entry)
    ARCHITECTURES.update(architectures(entry))
    platform = platforms.start(seed=0)
    converted = checkpoints / "own-converted" / "policy"
    if dist.get_rank() == 0:
        to_megatron(checkpoints / "own" / "policy", converted)
        to_huggingface(converted, checkpoints / "hf")
    dist.barrier()
    found = {
        "logits": logits(checkpoints, "own", platform),
        "ppo": two_iterations(once(config(checkpoints / "own", prompts, LAYOUTS, ROLLOUTS["in place"]))),
    }
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    platforms.stop()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
