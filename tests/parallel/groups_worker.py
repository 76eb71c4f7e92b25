"""What four ranks do with process groups before the engine is built: python -m tests.parallel.groups_worker OUT."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import vllm.distributed.parallel_state as state

from hybridflow.errors import DisagreementError
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.grid import Grid, ProcessGroups
from hybridflow.parallel.layout import Layout, RolloutLayout
from hybridflow.roles.engine_replica import check_same_tokens
from hybridflow.roles.warm_up import warm_up
from hybridflow.rollout.patches import engine_pipelines, join_groups
from hybridflow.rollout.row import RolloutRow

RANKS = (0, 1, 2, 3)
LAYOUTS = {
    "tp 2, pp 2": Layout(2, 2, 1, RANKS),
    "pp 4, two chunks": Layout(1, 4, 1, RANKS, vpp=2),
    "dp 4": Layout(1, 1, 4, RANKS),  # of a model that nobody trains, as all here
}


def warmed(layout: Layout) -> list[list[Any]]:
    """(what, ranks of the group, peer) in the order of this rank's calls."""
    groups, calls = ProcessGroups(), list[list[Any]]()
    Grid.build(layout, groups)

    def noting(name: str) -> mock._patch:
        function = getattr(dist, name)

        def call(tensor: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            peer = named.get("dst", named.get("src"))
            calls.append([name, dist.get_process_group_ranks(named["group"]), peer])
            return function(tensor, *arguments, **named)

        return mock.patch.object(dist, name, call)

    rollout = SimpleNamespace(replicas=[(rank,) for rank in RANKS], tp=1)
    config = SimpleNamespace(generates_beside=False)
    model = SimpleNamespace(layout=layout, config=None, spec=None)
    run: Any = SimpleNamespace(world_size=4, models={"reference": model}, rollout=rollout, config=config)
    with noting("all_reduce"), noting("isend"), noting("irecv"):
        warm_up(run, groups, torch.device("cpu"))
    return calls


def joined(layout: RolloutLayout, *, custom: bool) -> dict[str, Any]:
    """Whether vLLM may sum by its kernel as each group is made; how often all ranks have met to make one."""
    seen, met, make, new_group = [], [], state.init_model_parallel_group, dist.new_group

    def making(*arguments: Any, **named: Any) -> Any:
        seen.append(state._ENABLE_CUSTOM_ALL_REDUCE)
        return make(*arguments, **named)

    def meeting(ranks: list[int], **named: Any) -> Any:
        met.extend([ranks] * (not named.get("use_local_synchronization", False)))
        return new_group(ranks, **named)

    with mock.patch.object(state, "init_model_parallel_group", making), mock.patch.object(dist, "new_group", meeting):
        join_groups(layout, (), 0, custom_all_reduce=custom)
    sizes = [state.get_tp_group().world_size, state.get_pp_group().world_size, len(engine_pipelines())]
    return {"custom": seen, "met": met, "sizes": sizes}


def drawn(rank: int) -> str:
    """Of two replicas, whose tokens differ in the first."""
    group = ProcessGroups().own([(0, 1), (2, 3)])
    try:
        check_same_tokens([(4, RolloutRow([7, 8])), (5, RolloutRow([9, 1 + (rank == 1)]))], group)
    except DisagreementError as error:
        return str(error)
    return ""


def main(out: Path) -> None:
    platform = platforms.start(seed=0)
    own = {
        "warmed": {name: warmed(layout) for name, layout in LAYOUTS.items()},
        "joined": [joined(RolloutLayout(2, 1, ((0, 1), (2, 3))), custom=custom) for custom in (False, True)],
        "drawn": drawn(platform.rank),
    }
    everyone: list[Any] = [None] * len(RANKS)
    dist.all_gather_object(everyone, own)
    if platform.rank == 0:
        out.write_text(json.dumps(everyone))
    platforms.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
