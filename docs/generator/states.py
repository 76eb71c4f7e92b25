"""The table of docs/guides/memory-and-oom.md: memory of shipped configs by where the optimizer's state lies.

    <!-- generated: states -->

Plans, as `hybridflow plan CONFIG --world-size N --memory-gib 80 --all` prints them. Nothing runs.
"""

from collections.abc import Sequence
from contextlib import chdir

from docs.generator.families import GIB, ROOT
from docs.generator.markdown import code, table
from hybridflow.config import TrainedRoleConfig, read_tree
from hybridflow.config.kinds import config_class
from hybridflow.placement.footprint import together
from hybridflow.placement.forecast import fullest, memory_of
from hybridflow.placement.host_bytes import fullest_host
from hybridflow.placement.hosts import equal_hosts
from hybridflow.placement.placed import PlacedModels, place

TITLES = ("Config", "GPUs", "Training, `true`", "Training, `always`", "Fits 80 GiB", "Host memory, `always`")
GPU_BYTES, HOST = 80 * GIB, 8
HALF = ("actor.data_parallel_size=2", "critic.data_parallel_size=2")
ALONE = ("actor.tensor_parallel_size=1", "actor.data_parallel_size=1", "actor.sequence_parallel=false")
ROWS: Sequence[tuple[str, int, tuple[str, ...]]] = (  # config, GPUs, overrides
    ("recipes/ultrachat_mistral_7b_sft", 1, ALONE),
    ("llama3_8b_8gpus", 8, ()),
    ("qwen3_30b_a3b_8gpus", 8, ()),
    ("glm_45_air_32gpus", 32, ()),
    ("qwen2_72b_64gpus", 64, ()),
    ("recipes/llama3_70b_ppo_128gpus", 64, HALF),
    ("recipes/llama3_70b_ppo_128gpus", 128, ()),
    ("qwen3_235b_a22b_64gpus", 64, ()),
)


def part(_: str) -> str:
    """The text between two marks."""
    with chdir(ROOT):  # configs name their models from there
        return table(TITLES, map(_row, ROWS))


def _row(row: tuple[str, int, tuple[str, ...]]) -> list[str]:
    name, gpus, overrides = row
    path = f"configs/{name}.yaml"
    before, after = (_placed(path, gpus, overrides, always=always) for always in (False, True))
    words = {(True, True): "both", (False, True): "`always` alone", (False, False): "neither"}
    fits = fullest(before).needed <= GPU_BYTES, fullest(after).needed <= GPU_BYTES
    taken = sum(fullest_host(after, equal_hosts(gpus, HOST)).by_key.values())
    return [code(path), str(gpus), _training(before), _training(after), words[fits], f"{taken / GIB:,.0f}"]


def _placed(path: str, gpus: int, overrides: tuple[str, ...], *, always: bool) -> PlacedModels:
    """With the states of all trained roles there; else on the device while models train."""
    tree = read_tree(path, (*overrides, "platform=cuda"))
    kind = config_class(tree)
    config = kind.from_tree(tree, path)
    for name, role in config.roles().items():
        if isinstance(role, TrainedRoleConfig):
            tree[name]["offload_optimizer"] = "always" if always else config.generates
    return place(kind.from_tree(tree, path), gpus)


def _training(run: PlacedModels) -> str:
    """GiB of the fullest rank, without libraries."""
    memory = memory_of(run)
    on_rank = memory.moments()["training"]
    most = max(together(list(on_rank(rank).values())).total for rank in memory.one_of_each())
    return f"{most / GIB:.1f}"
