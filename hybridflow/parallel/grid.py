"""A layout's process groups on this rank: the only user of megatron's group collection.

Every role has a grid; several may lie over the same ranks or over others. Nothing is written into megatron's
global parallel state.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NoReturn

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from hybridflow.parallel.layout import Group, Layout, Place, TrainingCoordinates


@dataclass
class ProcessGroups:
    """Groups by their ranks: roles with like groups share them. All ranks of the world ask alike, in one order."""

    _made: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)

    def own(self, rank_lists: Iterable[tuple[int, ...]]) -> dist.ProcessGroup | None:
        """Make the groups of the lists, which do not overlap; the one that this rank is in, if any."""
        rank, found = dist.get_rank(), None
        for ranks in rank_lists:
            if ranks not in self._made:
                self._made[ranks] = self._make(ranks, rank)
            found = self._made[ranks] if rank in ranks else found
        return found

    def made(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of these ranks, if this rank has made it and is in it."""
        return self._made.get(ranks)

    def _make(self, ranks: tuple[int, ...], rank: int) -> dist.ProcessGroup | None:
        if len(ranks) == 1:  # nobody else needs to know: without this a world of n ranks would meet n times
            return dist.new_group(list(ranks), use_local_synchronization=True) if rank in ranks else None
        group = dist.new_group(list(ranks))
        return group if rank in ranks else None


@dataclass(frozen=True)
class Grid:
    """One role's layout and groups as this rank sees them. `build` is collective over the world."""

    layout: Layout
    coordinates: TrainingCoordinates | None  # None on a rank outside the layout, which has no groups either
    collection: ProcessGroupCollection | None
    context_group: dist.ProcessGroup | None = None  # of the ranks that share tokens with this one

    @classmethod
    def build(cls, layout: Layout, groups: ProcessGroups) -> "Grid":
        """Every rank of the world calls this in the same order, those outside the layout too."""
        collection, rank = _collection(layout, groups), dist.get_rank()
        context = groups.own(layout.groups("cp")) if layout.cp > 1 else None
        if rank not in layout:
            return cls(layout, None, None)
        return cls(layout, layout.coordinates(rank), collection, context)

    @property
    def groups(self) -> ProcessGroupCollection:
        """Of a rank inside."""
        assert self.collection is not None, self._outside()
        return self.collection

    @property
    def tp(self) -> int:
        return self.layout.tp

    @property
    def pp(self) -> int:
        return self.layout.pp

    @property
    def dp(self) -> int:
        return self.layout.dp

    @property
    def inside(self) -> bool:
        """Whether this rank holds a part of the model."""
        return self.coordinates is not None

    @property
    def tp_rank(self) -> int:
        return self.own_coordinates.tp

    @property
    def pp_rank(self) -> int:
        return self.own_coordinates.pp

    @property
    def dp_rank(self) -> int:
        return self.own_coordinates.dp

    @property
    def cp_rank(self) -> int:
        """This rank's place among those that share tokens."""
        return self.own_coordinates.cp

    def in_step(self, *, trains: bool) -> list[dist.ProcessGroup]:
        """The groups whose ranks have to run equally many passes: those that share experts.

        Where gradients are summed up during the last pass, also those that share tokens: else a sum that waits for a
        rank would stand in front of a gather that the rank waits for.
        """
        found = [self.groups.tp_ep] if self.layout.dense_per_expert_copy > 1 else []
        if trains and self.context_group is not None:
            found.append(self.groups.dp if found else self.context_group)
        return found

    def place(self, group: Group) -> Place:
        """Which part of the weights of a group this rank holds."""
        return self.layout.place(group, self.own_coordinates)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the layout's first, which tells what is alike on all ranks."""
        return self.coordinates == (0, 0, 0, 0)

    def copy_index(self, group: Group) -> int:
        """Which copy of the weights of a group this rank has a part of."""
        return self.layout.copy_index(group, self.own_coordinates)

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    @property
    def contributes(self) -> bool:
        """Whether this rank contributes results to an exchange: one rank of each copy of the weights does."""
        return self.inside and self.tp_rank == 0 and self.is_last_stage

    @property
    def own_coordinates(self) -> TrainingCoordinates:
        assert self.coordinates is not None, self._outside()
        return self.coordinates

    def _outside(self) -> str:
        return f"rank {dist.get_rank()} is not among the ranks {self.layout.ranks}"


class GroupsOfGrid(ProcessGroupCollection):
    """megatron's collection, in which a group that nobody has made is an error: 0.19.2 answers None, as if there were
    one rank. Those that it asks for of weights that are sharded and gathered at each use are None: there are no such.
    """

    gtp_remat = expt_gtp_remat = None

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"this grid has no process group {name!r}")


def _collection(layout: Layout, groups: ProcessGroups) -> ProcessGroupCollection:
    """The groups of the collection are None on ranks outside the layout. megatron's dp: copies of the dense weights."""
    tp, copies, pp = (groups.own(layout.groups(*axes)) for axes in (("tp",), ("cp", "dp"), ("pp",)))
    both = groups.own(layout.groups("tp", "pp"))
    dense = {"tp": tp, "dp": copies, "pp": pp, "mp": both}
    dense["tp_dp_cp"] = groups.own(layout.groups("tp", "cp", "dp"))
    dense["intra_dist_opt"] = groups.own([layout.ranks])
    dense["embd"] = groups.own(_ends(layout))
    dense["pos_embd"] = groups.own(layout.groups()[: layout.ranks_per_stage])
    alone = groups.own((rank,) for rank in layout.ranks)  # megatron's layers know nothing of context parallelism
    return GroupsOfGrid(
        **dense,
        **_groups_of_experts(layout, groups),
        cp=alone,
        **dict.fromkeys(("dp_cp", "intra_dp_cp"), copies),
        tp_cp=tp,
        inter_dist_opt=None,
        hcp=None,
    )


def _groups_of_experts(layout: Layout, groups: ProcessGroups) -> dict[str, dist.ProcessGroup | None]:
    """By the names by which megatron asks for them."""
    copies = groups.own(layout.expert_groups("edp"))
    return {
        "ep": groups.own(layout.expert_groups("ep")),
        "expt_tp": groups.own(layout.expert_groups("etp")),
        "tp_ep": groups.own(layout.expert_groups("etp", "ep")),
        "tp_ep_pp": groups.own(layout.expert_groups("etp", "ep", "pp")),
        "expt_dp": copies,
        "intra_expt_dp": copies,
    }


def _ends(layout: Layout) -> list[tuple[int, ...]]:
    """(first and last stage) of each pipeline: where tied embeddings live."""
    return [tuple(sorted({pipeline[0], pipeline[-1]})) for pipeline in layout.groups("pp")]
