"""What libraries take of a GPU beside all that the tables of memory count, by the layout of the run. Pure.

    Margins(run)(rank)          the parts, each by name; all are 0 on CPUs

Groups of the same ranks are one group with one communicator, see `parallel.grid`. vLLM has communicators of its own.
Nobody has measured a run of several GPUs. The one H100 that has run was never full. So most numbers are guesses, from
what others report of NCCL and vLLM.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from hybridflow.config import TrainedRoleConfig
from hybridflow.parallel.layout import Layout
from hybridflow.placement.placed import PlacedModel, PlacedModels, PlacedRun

GIB = 1 << 30
CONTEXT = GIB // 2  # a guess: CUDA's context and the code of kernels
COMMUNICATOR = 3 * GIB // 10  # a guess, of 0.15 to 0.5: NCCL's buffers of one group, or of two neighbouring stages
# measured on one H200: 0.39 GiB for 16 layers and steps of up to 256 sequences. They stay while models train
GRAPHS_OF_LAYER = 39 * GIB // 1600
# a guess: cuBLAS, Triton, Transformer Engine's empty gradients, and what torch's allocator cannot give again to
# micro-batches of another size
WORKSPACES = 3 * GIB // 2
# a guess, of 0.2 to 0.6: vLLM's all-reduce within a host, symmetric memory, FlashInfer
ENGINE_WORKSPACES = 6 * GIB // 10

GROUP, WORLD = "group", "world"
Communicator = tuple[str, tuple[int, ...], tuple[int, ...]]  # whose; ranks of the group; of these, those that it links


@dataclass(frozen=True)
class Margin:
    """Bytes on one rank."""

    context: int = 0
    num_communicators: int = 0
    graphs: int = 0
    workspaces: int = 0

    @property
    def communicators(self) -> int:
        return self.num_communicators * COMMUNICATOR

    @property
    def total(self) -> int:
        return self.context + self.communicators + self.graphs + self.workspaces

    @property
    def words(self) -> str:
        """GiB of the parts that there are, for people."""
        parts = {
            "CUDA's context": self.context,
            f"{self.num_communicators} communicator{'s' * (self.num_communicators != 1)}": self.communicators,
            "CUDA graphs": self.graphs,
            "workspaces": self.workspaces,
        }
        return ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)


class Margins:
    """Of every rank of a run."""

    def __init__(self, run: PlacedModels) -> None:
        self._run = run
        self._counts = _counts(communicators(run)) if run.cuda else Counter[int]()

    def __call__(self, rank: int) -> Margin:
        run = self._run
        if not run.cuda:
            return Margin()
        least, graphs, workspaces = least_margin(1), 0, 0
        if isinstance(run, PlacedRun) and rank in run.rollout:
            layers = len(run.stages[run.rollout.coordinates(rank).pp])
            graphs, workspaces = engine_bytes_beside(layers, run.rollout.tp, captures=run.captures_graphs)
        return Margin(least.context, self._counts[rank], graphs, least.workspaces + workspaces)


def most_words(run: PlacedModels) -> str:
    """A line for people, of the rank on which libraries take most; "" on CPUs."""
    most = max(map(Margins(run), range(run.world_size)), key=lambda each: each.total)
    return f"Libraries take up to {most.total / GIB:.2f} GiB of a rank more: {most.words}." if run.cuda else ""


def least_margin(world_size: int) -> Margin:
    """On a rank of so many, whatever the layout."""
    return Margin(CONTEXT, int(world_size > 1), workspaces=WORKSPACES)


def engine_bytes_beside(num_layers: int, tp: int, *, captures: bool) -> tuple[int, int]:
    """(graphs, workspaces) of an engine that has so many layers on a rank."""
    return num_layers * GRAPHS_OF_LAYER * captures, ENGINE_WORKSPACES * (tp > 1)


def bytes_by_rank(models: Iterable[PlacedModel]) -> dict[int, int]:
    """Of the communicators that these roles make, those that they share once."""
    counts = _counts(each for model in models for each in _of_role(model.layout, *_ways(model)))
    return {rank: COMMUNICATOR * count for rank, count in counts.items()}


def role_bytes(model: PlacedModel, *, cuda: bool) -> tuple[int, ...]:
    """Of the communicators that this role alone would make, on a rank of each stage."""
    return _bytes_of_stages(model.layout, *_ways(model)) if cuda else (0,) * model.layout.pp


@cache
def _bytes_of_stages(layout: Layout, trained: bool, zero1: bool, tied: bool) -> tuple[int, ...]:
    counts = _counts(_of_role(layout, trained, zero1, tied))
    return tuple(COMMUNICATOR * counts[rank] for rank in layout.ranks[:: layout.ranks_per_stage])


@cache
def vllm_bytes(tp: int, pp: int) -> int:
    """Of vLLM's communicators, on a rank of an end stage."""
    replica = tuple(range(tp * pp))
    return COMMUNICATOR * _counts(_of_replica(replica, tp))[0]


def _counts(made: Iterable[Communicator]) -> Counter[int]:
    """By rank: communicators of more than one rank."""
    return Counter(rank for _, _, ranks in set(made) if len(ranks) > 1 for rank in ranks)


def communicators(run: PlacedModels) -> Iterator[Communicator]:
    """All that ranks make on GPUs, some of them again and again, in an order that is alike on all ranks."""
    world = tuple(range(run.world_size))
    yield WORLD, world, world  # results of all ranks, and messages of the reshard
    for model in run.models.values():
        yield from _of_role(model.layout, *_ways(model))
    if run.rollout is None:
        return
    for replica in run.rollout.replicas:
        yield from _of_replica(replica, run.rollout.tp)
    if run.config.generates_beside:
        yield _group(tuple(rank for rank in world if rank not in run.rollout))


def _of_replica(replica: tuple[int, ...], tp: int) -> Iterator[Communicator]:
    """vLLM's of tp groups and pipelines; torch's of neighbouring stages."""
    for start in range(0, len(replica), tp):
        stage = replica[start : start + tp]
        yield "vllm", stage, stage
    if len(replica) > tp:
        for pipeline in (replica[rank::tp] for rank in range(tp)):
            yield "vllm's pipeline", pipeline, pipeline
            yield from (("vllm's stages", pipeline, pair) for pair in pairwise(pipeline))


def _ways(model: PlacedModel) -> tuple[bool, bool, bool]:
    """Whether it is trained, with ZeRO-1, and has an embedding that is the output layer and is trained."""
    config, spec = model.config, model.spec
    if not isinstance(config, TrainedRoleConfig):
        return False, False, False
    zero1 = config.optimizer.zero1 and config.optimizer.name == "adam"
    return True, zero1, spec.tied and model.head == "lm" and spec.lora is None


def _of_role(layout: Layout, trained: bool, zero1: bool, tied: bool) -> Iterator[Communicator]:
    groups, shares_experts = layout.groups("tp"), layout.dense_per_expert_copy > 1
    if layout.cp > 1:
        groups += layout.groups("cp")
    if shares_experts:
        groups += layout.expert_groups("etp", "ep")
    if trained:
        groups += layout.groups("cp", "dp")
        groups += layout.expert_groups("edp") if shares_experts else []
        # the norm of the gradients: of all ranks with ZeRO-1, otherwise of a copy of the weights
        groups += [layout.ranks] if zero1 else layout.groups("tp", "pp")
        groups += layout.expert_groups("etp", "ep", "pp") if shares_experts and not zero1 else []
    if tied and layout.pp > 1:  # gradients of the embedding, of which the last stage has a copy
        groups += [(pipeline[0], pipeline[-1]) for pipeline in layout.groups("pp")]
    yield from map(_group, groups)
    yield from _of_stages(layout)


def _of_stages(layout: Layout) -> Iterator[Communicator]:
    """torch makes one of two neighbours each. Of two stages megatron sends half of the messages in the world's."""
    for pipeline in layout.groups("pp"):
        around = [pipeline[-1:] + pipeline[:1]] if layout.vpp > 1 and layout.pp > 2 else []
        for pair in (*pairwise(pipeline), *around):
            yield "stages", pipeline, pair
            if layout.pp == 2:
                yield "stages in the world's group", pipeline, pair


def _group(ranks: tuple[int, ...]) -> Communicator:
    return GROUP, ranks, ranks
