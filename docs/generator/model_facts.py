"""What docs/models/ says of each model at a glance: six facts, of the code, of plans and of configs/.

    <!-- generated: facts Qwen3 -->           of one family, a row each
    <!-- generated: facts -->                 of all families, in one table

The least GPUs are found by plans of docs/models/layouts.yaml: the number doubles until one of the layouts below fits.
"""

import re
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

from docs.generator.families import CONFIG, LAYOUTS, ROOT, SHAPES, marks
from docs.generator.markdown import listed, table
from hybridflow.architecture.families import FAMILIES
from hybridflow.architecture.spec import ModelSpec, read_spec
from hybridflow.config import ExperimentConfig, read_tree
from hybridflow.errors import ConfigError
from hybridflow.placement.adapters import linear_layers
from hybridflow.placement.forecast import fullest
from hybridflow.placement.host_bytes import fullest_host
from hybridflow.placement.hosts import equal_hosts
from hybridflow.placement.placed import place

PAGES = ROOT / "docs" / "models"
TITLES = ("Ran on a GPU", "Routing replay", "Context", "LoRA", "Least GPUs", "Recipes")
RAN = {  # docs/explanation/gpus.md
    "Llama": "GRPO and PPO of Llama-3.2-1B's shape, on one H100",
    "Qwen3Moe": "GRPO with routing replay of 8 layers with 64 experts, on one H100",
}
GPU_BYTES, MOST_GPUS, HOST, MOST_EXPERT_PARALLEL = 80 << 30, 1024, 8, 64
STAGES = (1, 2, 4, 8)
HOST_BYTES = 2 * 10**12
LEAN = ("reference=null", "algorithm.kl.use=none", "actor.recompute=full", "actor.offload_optimizer=always")
LORA = ("actor.lora.rank=32", "actor.lora.alpha=32")


def part(what: str) -> str:
    """The text between two marks. what: `facts`, or `facts` and the family."""
    _, *names = what.split()
    if names:
        return table(("At a glance", ""), zip(TITLES, facts(names[0]), strict=True))
    pages = {mark: page for page in PAGES.glob("*.md") for mark in marks(page.read_text())}
    rows = []
    for name in LAYOUTS:
        ran, replay, context, _, gpus, recipes = facts(name)
        link = f"[{name}]({pages[f'family {name}'].name})"
        rows.append((link, ran, replay, context.partition(" tokens")[0], "yes", gpus, recipes))
    return table(("Family", *TITLES), rows)


@cache
def facts(name: str) -> tuple[str, ...]:
    """Of a family, in the order of TITLES."""
    specs = {layout.shape: read_spec(ROOT / SHAPES / layout.shape) for layout in LAYOUTS[name]}
    return (
        RAN.get(name, "no"),
        "yes" if FAMILIES[name].experts else "no experts",
        _context(specs),
        _adapters(next(iter(specs.values()))),
        "; ".join(f"{shape}: {_least(shape)}, LoRA {_least(shape, *LORA)}" for shape in specs),
        ", ".join(_recipes(name)) or "none",
    )


def _context(specs: dict[str, ModelSpec]) -> str:
    counts = dict.fromkeys(spec.max_positions for spec in specs.values())
    of = {count: [shape for shape, spec in specs.items() if spec.max_positions == count] for count in counts}
    named = [f"{count:,} ({', '.join(shapes)})" if len(of) > 1 else f"{count:,}" for count, shapes in of.items()]
    learned = next(iter(specs.values())).traits.embedding.position_offset
    more = "no more" if learned else "more by `hf_overrides`"
    return f"{', '.join(named)} tokens, {more}; context parallelism"


def _adapters(spec: ModelSpec) -> str:
    return listed(dict.fromkeys(layer.rsplit(".", 1)[1] for layer in linear_layers(spec)))


# ------------------------------------------------------------------------------------------------ the least GPUs


@cache
def _least(shape: str, *overrides: str) -> str:
    gpus = 1
    while gpus <= MOST_GPUS:
        if any(_fits(shape, gpus, [*LEAN, *overrides, *sizes]) for sizes in _layouts(shape, gpus)):
            return f"{gpus:,}"
        gpus *= 2
    return f"more than {MOST_GPUS:,}"


def _layouts(shape: str, gpus: int) -> Iterator[list[str]]:
    """Of so many GPUs, with experts over all ranks of a stage."""
    spec = read_spec(ROOT / SHAPES / shape)
    for pp, tp, engine in product(STAGES, (8, 4, 2, 1), (1, 2, 4)):
        last = spec.num_layers - (pp - 1) * -(-spec.num_layers // pp)
        if gpus % (tp * pp) or gpus % (tp * engine) or last < 1 or (engine > 1 and tp < HOST):
            continue
        ep = min(gpus // pp, MOST_EXPERT_PARALLEL) if spec.num_experts else 1
        sizes = {"tensor": tp, "pipeline": pp, "expert": ep}
        yield [
            *(f"actor.{kind}_parallel_size={size}" for kind, size in sizes.items()),
            *([f"actor.num_layers_in_last_pipeline_stage={last}"] if pp > 1 else []),
            f"actor.sequence_parallel={str(tp > 1).lower()}",
            f"rollout.tensor_parallel_size={tp * engine}",
        ]


def _fits(shape: str, gpus: int, overrides: list[str]) -> bool:
    """By the memory of the fullest GPU, with libraries, and of a host: the verdict of `hybridflow plan --memory-gib 80`
    and a --host-memory-gib of 2 TB."""
    tree = read_tree(ROOT / CONFIG, overrides)
    tree["actor"]["model"] = str(ROOT / SHAPES / shape)
    try:
        run = place(ExperimentConfig.from_tree(tree, CONFIG), gpus)
    except ConfigError:  # the model cannot be cut so
        return False
    on_host = fullest_host(run, equal_hosts(gpus, HOST)).bytes
    return on_host <= HOST_BYTES and fullest(run).needed <= GPU_BYTES


# ------------------------------------------------------------------------------------------------ recipes


def _recipes(name: str) -> list[str]:
    """Links to the shipped configs of the family's models."""
    return [
        f"[{path.stem}](../../{path.relative_to(ROOT)})"
        for path in sorted((ROOT / "configs").rglob("*.yaml"))
        if any(_family(shape) == FAMILIES[name].name for shape in _shapes_in(path))
    ]


@cache
def _shapes_in(path: Path) -> list[str]:
    """Of a config, by the directories that its text names, or by the names that its models have on the Hub."""
    text = path.read_text()
    known = {shape.name for shape in (ROOT / SHAPES).iterdir()}
    on_hub = [found.lower() for found in re.findall(r"model: [\w-]+/([\w.-]+)", text)]
    return [shape for shape in sorted(known) if f"{SHAPES}/{shape}" in text or any(x.startswith(shape) for x in on_hub)]


@cache
def _family(shape: str) -> str:
    return read_spec(ROOT / SHAPES / shape).family
