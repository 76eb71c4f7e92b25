"""The process groups that a run of the config makes: each is made, used once and kept, as before the engine is built.

Which groups there are is what the plan counts, see `placement.margin`; what they take is seen here. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence

from hybridflow.inspection.findings import Finding, gigabytes
from hybridflow.parallel.rank0_commands import Answer
from hybridflow.parallel.ranks import counted, shown
from hybridflow.placement.margin import communicators
from hybridflow.placement.placed import PlacedModels

AREA = "groups"
Ranks = tuple[int, ...]


def rounds_of(run: PlacedModels) -> list[list[Ranks]]:
    """Disjoint groups of one size, which can be made at a time; vLLM's ranks meet in groups of their own."""
    rounds: list[list[Ranks]] = []
    for _, ranks in dict.fromkeys((whose, linked) for whose, _, linked in communicators(run) if len(linked) > 1):
        last = rounds[-1] if rounds else []
        if last and len(last[0]) == len(ranks) and not any(set(ranks) & set(other) for other in last):
            last.append(ranks)
        else:
            rounds.append([ranks])
    return rounds


def group_finding(made: Sequence[Ranks], answers: Mapping[int, Answer]) -> Finding:
    """Of a round: the most seconds, and on GPUs the most bytes that a rank has less."""
    ranks = [rank for group in made for rank in group]
    slowest = max(ranks, key=lambda rank: float(answers[rank]["seconds"]))
    seconds, taken = float(answers[slowest]["seconds"]), _taken(answers[rank] for rank in ranks)
    value = f"{len(made)} of {counted(len(made[0]))}: {seconds:.2f} s at most, of rank {slowest}"
    value += f"; {taken / (1 << 20):,.0f} MiB a rank at most" if taken is not None else ""
    figures = {"seconds": round(seconds, 3), "bytes": taken}
    return Finding(AREA, f"{shown(made[0])}{', ...' * (len(made) > 1)}", "all", value, figures=figures)


def memory_finding(first: Mapping[int, Answer], last: Mapping[int, Answer]) -> Finding | None:
    """On the rank that has least free in the end; None on CPUs. first, last: answers by rank."""
    there = {rank: answer["free_after"] for rank, answer in last.items() if answer["free_after"] is not None}
    if not there:
        return None
    least = min(there, key=lambda rank: int(there[rank]))
    before, after = int(first[least]["free_before"]), int(there[least])
    value = f"rank {least}: {gigabytes(before)} free before all groups, {gigabytes(after)} after"
    return Finding(AREA, "GPU memory", "all", value, figures={"free_before_bytes": before, "free_after_bytes": after})


def _taken(answers: Iterable[Answer]) -> int | None:
    sizes = [a["free_before"] - a["free_after"] for a in answers if a["free_after"] is not None]
    return max(sizes, default=None)
