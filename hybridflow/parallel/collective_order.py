"""Whether all ranks of a run asked for collectives in an order in which none can wait for another for ever. Pure.

    HYBRIDFLOW_RECORD_COLLECTIVES=DIR hybridflow train mine.yaml
    python -m hybridflow.parallel.collective_order DIR        # what is wrong, and status 1

1. All ranks of a group make the same collectives in the same order: operation, root, type and shape. Only what each
   rank gives in an all-to-all or gets of a list that is reduced and scattered may have sizes of its own.
2. From one rank to another a group's n-th receive is of its n-th send. Tags count for nothing: NCCL has none.
3. There is no circle of calls of which each comes before the next on some rank.

For the third a collective of a group is one event of all its ranks, and a send is one event with its receive: nobody
leaves before all have entered. NCCL keeps to that, gloo not always. A rank's events of one thread are in the order of
the calls, also where nobody waits: on a GPU two communicators that run at once can each hold what the other needs, so
NCCL asks for one order on all ranks. The host often waits for the device between two calls, hence calls with tensors of
the CPU stand in the same order as others. Calls of one `batch_isend_irecv` have no order among themselves, only with
what comes before and after. A pipeline's sends and receives are no such batch: both ends have the order that they had.
Different threads have no order. Where something is wrong by 1 or 2, nobody looks for 3: events would not be the same.
"""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise, product, zip_longest
from pathlib import Path

from hybridflow.errors import EnvironmentProblem, UserError
from hybridflow.parallel.ranks import counted, shown

OWN_SIZES = ("all_to_all_single", "alltoall_base", "alltoall", "reduce_scatter")
ANYBODY, MAIN = "recv_anysource", "MainThread"
Pair = tuple[int, int]


@dataclass(frozen=True)
class Call:
    """As `CollectiveRecord` writes it. Ranks are those of the world. batch: sends and receives that travel together."""

    group: str
    operation: str
    shape: tuple[int, ...] | None = None
    elements: int = 0  # of all tensors, of which `shape` is the first's
    dtype: str = ""
    device: str = ""
    root: int | None = None
    peer: int | None = None
    batch: int | None = None
    thread: str = MAIN

    def __str__(self) -> str:
        root = "" if self.root is None else f" of rank {self.root}"
        what = "" if self.shape is None else f" {self.dtype} {list(self.shape)}"
        return f"{self.operation}{root}{what}"

    @property
    def is_collective(self) -> bool:
        return self.operation not in ("send", "recv", ANYBODY)

    def pair(self, rank: int) -> Pair | None:
        """(from, to) of a message that this rank sends or receives; None of others."""
        if self.peer is None:
            return None
        return (rank, self.peer) if self.operation == "send" else (self.peer, rank)

    @property
    def signature(self) -> tuple[object, ...]:
        """What all ranks of a group say alike."""
        sizes = () if self.operation in OWN_SIZES else (self.shape, self.elements)
        return self.operation, self.root, self.dtype, *sizes


@dataclass(frozen=True)
class RankGroup:
    ranks: tuple[int, ...]
    description: str = ""


Groups = Mapping[str, RankGroup]
Calls = Mapping[int, Sequence[Call]]  # by rank
Event = tuple[str, Pair | None, int]  # group, (from, to) of a send and its receive, the how manieth
Part = tuple[set[int], Event, Event]  # ranks on which one event comes before the other


def findings(groups: Groups, calls: Calls) -> list[str]:
    """What is wrong, a line each."""
    absent = sorted({rank for group in groups.values() for rank in group.ranks} - calls.keys())
    wrong = [f"there is no record of rank {shown(absent)}"] if absent else []
    for name, group in groups.items():
        own = {rank: [call for call in calls[rank] if call.group == name] for rank in group.ranks if rank in calls}
        wrong += [*_disagreement(_named(name, group), own), *_unmatched(_named(name, group), own)]
    return wrong or _circle(groups, calls)


def _named(name: str, group: RankGroup) -> str:
    return f"group {name} ({group.description + ', ' if group.description else ''}ranks {shown(group.ranks)})"


def _disagreement(group: str, calls: Calls) -> Iterator[str]:
    """The first place at which ranks of the group part."""
    collectives = {rank: [call for call in own if call.is_collective] for rank, own in calls.items()}
    for number, row in enumerate(zip_longest(*collectives.values())):
        ranks = defaultdict[object, list[int]](list)
        for rank, call in zip(collectives, row, strict=True):
            ranks[call and call.signature].append(rank)
        if len(ranks) > 1:
            said = {own[0]: row[list(collectives).index(own[0])] for own in ranks.values()}
            each = (f"{said[own[0]] or 'none'} on rank {shown(own)}" for own in ranks.values())
            yield f"{group}, collective {number}: {'; '.join(each)}"
            return


def _unmatched(group: str, calls: Calls) -> Iterator[str]:
    """Of each pair of ranks the first message without another end. Of receives from anybody nothing is known."""
    from_anybody = {rank for rank, own in calls.items() if any(call.operation == ANYBODY for call in own)}
    messages = defaultdict[Pair, dict[str, list[Call]]](lambda: {"send": [], "recv": []})
    for rank, own in calls.items():
        for call in own:
            if pair := call.pair(rank):
                messages[pair][call.operation].append(call)
    for (source, target), ends in sorted(messages.items()):
        if target in from_anybody or not {source, target} <= calls.keys():
            continue
        for number, (sent, received) in enumerate(zip_longest(ends["send"], ends["recv"])):
            if not sent or not received or (sent.dtype, sent.elements) != (received.dtype, received.elements):
                both = f"{sent or 'no send'} on rank {source}, {received or 'no receive'} on rank {target}"
                yield f"{group}, message {number} from rank {source} to rank {target}: {both}"
                break


# ------------------------------------------------------------------------------------------------ circles


def _circle(groups: Groups, calls: Calls) -> list[str]:
    """One of those that there are."""
    earlier = defaultdict[Event, dict[Event, set[int]]](lambda: defaultdict(set))  # and the ranks that say so
    made = dict[Event, Call]()
    for rank, own in calls.items():
        for steps in _threads(rank, own):
            for step in steps:
                made |= step
            for former, latter in pairwise(steps):
                for before, after in product(former, latter):
                    earlier[after][before].add(rank)
    try:
        TopologicalSorter(earlier).prepare()
    except CycleError as error:
        circle: list[Event] = error.args[1]  # begins as it ends
    else:
        return []

    def text(event: Event) -> str:
        group, pair, number = event
        what = f"{made[event]} {number}" if pair is None else f"message {number} from rank {pair[0]} to rank {pair[1]}"
        return f"{what} of {_named(group, groups[group])}"

    parts = _joined([(earlier[after][before], before, after) for before, after in pairwise(circle)])
    each = (f"on rank {shown(sorted(ranks))} {text(one)} comes before {text(other)}" for ranks, one, other in parts)
    return [f"ranks can wait for each other: {'; '.join(each)}"]


def _joined(parts: Iterable[Part]) -> list[Part]:
    """Parts of a circle behind one another that the same ranks say are one; that of the lowest rank comes first."""
    found = list[Part]()
    for ranks, before, after in parts:
        if found and found[-1][0] & ranks:
            same, first, _ = found.pop()
            found.append((same & ranks, first, after))
        else:
            found.append((ranks, before, after))
    if len(found) > 2 and found[-1][0] & found[0][0]:
        ranks, before, _ = found.pop()
        found[0] = (ranks & found[0][0], before, found[0][2])
    lowest = min(range(len(found)), key=lambda i: min(found[i][0]))
    return found[lowest:] + found[:lowest]


def _threads(rank: int, calls: Iterable[Call]) -> Iterable[list[dict[Event, Call]]]:
    """Of each thread its steps in order. The events of a step have none."""
    counts, threads = Counter[object](), defaultdict[str, list[dict[Event, Call]]](list)
    batches = dict[str, int | None]()
    for call in calls:
        if call.operation == ANYBODY:  # nobody knows with which send it is one
            continue
        pair = call.pair(rank)
        if call.batch is None or call.batch != batches.get(call.thread):
            threads[call.thread].append({})
        batches[call.thread] = call.batch
        threads[call.thread][-1][call.group, pair, counts[call.group, pair]] = call
        counts[call.group, pair] += 1
    return threads.values()


# ------------------------------------------------------------------------------------------------ records


def read(directory: Path) -> tuple[dict[str, RankGroup], dict[int, list[Call]]]:
    """Of all ranks. The last line of a rank that was killed may be cut. Errors: EnvironmentProblem without a record."""
    groups, calls = dict[str, RankGroup](), dict[int, list[Call]]()
    for file in directory.glob("rank_*.jsonl"):
        own = calls[int(file.stem.removeprefix("rank_"))] = list[Call]()
        for text in file.read_text(encoding="utf-8").splitlines(keepends=True):
            if not text.endswith("\n"):
                continue
            line = json.loads(text)
            if "ranks" in line:
                groups[line["name"]] = RankGroup(tuple(line["ranks"]), line["description"])
            else:
                own.append(Call(**line | {"shape": tuple(line["shape"]) if "shape" in line else None}))
    if not calls:
        raise EnvironmentProblem(
            f"{directory}: has no rank_N.jsonl; HYBRIDFLOW_RECORD_COLLECTIVES={directory} writes it"
        )
    return groups, dict(sorted(calls.items()))


def main(directory: Path) -> int:
    groups, calls = read(directory)
    wrong = findings(groups, calls)
    number = sum(map(len, calls.values()))
    print("\n".join(wrong) or f"{counted(len(calls))}, {counted(len(groups), 'group')}, {number} calls: one order")
    return int(bool(wrong))


if __name__ == "__main__":
    try:
        sys.exit(main(Path(*sys.argv[1:])))
    except UserError as error:
        sys.exit(f"hybridflow: error: {error}")
