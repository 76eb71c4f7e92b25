"""Who is to blame for a hang, out of what the ranks say of themselves: pure functions, and the report as text.

First come ranks that say nothing, for they are stopped, dead, or stuck in code that keeps Python's lock. Where all
speak, those lead that others wait for and that wait for nobody: they have not entered a collective that the others
are in. Numbers of calls are compared group by group; see `hybridflow.parallel.collectives`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from hybridflow.parallel.collectives import LastCall
from hybridflow.parallel.ranks import shown


@dataclass(frozen=True)
class Statement:
    """What a rank says of itself when the run hangs."""

    rank: int
    who: str  # rank, pid and host, for people
    phase: str
    seconds: float  # in the phase, since it was last entered
    deadline: float | None
    stacks: str  # of the rank's threads, the main one first
    calls: tuple[LastCall, ...]  # the last one of each group, the latest first
    seen: Mapping[int, str]  # of the other ranks of the machine, what /proc says

    @property
    def current(self) -> LastCall | None:
        """The call that it is inside."""
        return next((call for call in self.calls if call.inside), None)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Statement":
        fields = json.loads(text)
        calls = tuple(LastCall(**{**call, "ranks": tuple(call["ranks"])}) for call in fields.pop("calls"))
        seen = {int(rank): state for rank, state in fields.pop("seen").items()}
        return cls(**fields, calls=calls, seen=seen)


def suspects(statements: Mapping[int, Statement], ranks: Iterable[int]) -> dict[int, str]:
    """Why the run hangs, by rank: the ranks to look at first, all of `ranks` being in the run."""
    silent = [rank for rank in ranks if rank not in statements]
    if silent:
        seen = {rank: state for statement in statements.values() for rank, state in statement.seen.items()}
        return {rank: _state(seen.get(rank)) for rank in silent}
    waits = {rank: _waits_for(statement, statements) for rank, statement in statements.items()}
    awaited = {rank for others in waits.values() for rank in others}
    found = {rank: _missed(rank, statements, waits) for rank in sorted(awaited) if not waits[rank]}
    if found:
        return found
    if awaited:  # everyone that is waited for waits: somewhere there is a circle
        return {rank: _circle(statements[rank], waits[rank]) for rank in sorted(awaited)}
    return _lagging(statements) or _outside(statements)


def report(statements: Mapping[int, Statement], names: Sequence[str]) -> str:
    """For people. names: every rank of the run, as text."""
    found = suspects(statements, range(len(names)))
    lines = [f"hybridflow: hang: {names[rank]} {reason}" for rank, reason in found.items()]
    if not found:
        lines = ["hybridflow: hang: no rank lags behind the others: all wait in the same collective"]
    first = max(statements.values(), key=lambda each: each.seconds - (each.deadline or float("inf")))
    limit = "" if first.deadline is None else f" (watchdog.{first.phase}_seconds = {first.deadline:g})"
    lines += [f"  phase {first.phase}: rank {first.rank} is in it for {first.seconds:.1f} s{limit}", ""]
    lines += ["What each rank did last:"]
    for rank, name in enumerate(names):
        lines += _did_last(name, statements.get(rank))
    for stacks, ranks in _by_stacks(statements).items():
        lines += ["", f"Python stacks of rank{'s' * (len(ranks) > 1)} {shown(ranks)}:", stacks.rstrip()]
    return "\n".join(lines) + "\n"


def report_alone(own: Statement, names: Sequence[str], mute: Iterable[int]) -> str:
    """Of one rank, where ranks cannot hear each other. mute: ranks of the same host that are stopped or dead."""
    lines = [f"hybridflow: hang: {names[rank]} {_state(own.seen[rank])}" for rank in mute]
    lines += [
        f"hybridflow: hang: {names[own.rank]} is in phase {own.phase} for {own.seconds:.1f} s; the store does not "
        "answer, so each rank speaks for itself",
        *(f"    {call}" for call in own.calls),
        f"Python stacks of rank {own.rank}:",
        own.stacks.rstrip(),
    ]
    return "\n".join(lines) + "\n"


def _waits_for(statement: Statement, statements: Mapping[int, Statement]) -> set[int]:
    """The ranks that have not entered the call that this one is inside."""
    call = statement.current
    if call is None:
        return set()
    if call.peer is not None:
        return {call.peer} & set(statements) - {statement.rank}
    others = set(call.ranks) & set(statements) - {statement.rank}
    return {rank for rank in others if _number(statements[rank], call) < call.number}


def _number(statement: Statement, call: LastCall) -> int:
    """How many collectives of that call's group the rank has entered."""
    return next((own.number for own in statement.calls if (own.group, own.ranks) == (call.group, call.ranks)), 0)


def _missed(rank: int, statements: Mapping[int, Statement], waits: Mapping[int, set[int]]) -> str:
    inside = {other: statements[other].current for other, awaited in sorted(waits.items()) if rank in awaited}
    call = next(iter(inside.values()))
    assert call is not None, "who waits is inside a call"
    waiting = [other for other, at in inside.items() if at and (at.group, at.number) == (call.group, call.number)]
    own = statements[rank].current
    doing = f"it is inside {own.operation} of group {own.group}" if own else "it is inside no collective"
    who = f"rank {shown(waiting)} waits" if len(waiting) == 1 else f"ranks {shown(waiting)} wait"
    what = f"{call.operation}, collective {call.number}" if call.peer is None else f"its side of {call.operation}"
    return f"has not entered {what} of group {call.group}, where {who}: {doing}, in phase {statements[rank].phase}"


def _circle(statement: Statement, awaited: set[int]) -> str:
    call = statement.current
    assert call is not None, "who waits is inside a call"
    return f"waits for rank{'s' * (len(awaited) > 1)} {shown(sorted(awaited))} in {call}"


def _lagging(statements: Mapping[int, Statement]) -> dict[int, str]:
    """Where a wait is not seen, as with NCCL, whose calls return at once: who has started fewer calls than others."""
    found = {}
    for rank, statement in sorted(statements.items()):
        for call in (call for other in statements.values() for call in other.calls if rank in call.ranks):
            if _number(statement, call) < call.number:
                found[rank] = (
                    f"has started {_number(statement, call)} collectives of group {call.group}, others {call.number}, "
                    f"the last one {call.operation}"
                )
                break
    return found


def _outside(statements: Mapping[int, Statement]) -> dict[int, str]:
    """Those that no collective keeps."""
    return {
        rank: f"is inside no collective, in phase {statement.phase}"
        for rank, statement in sorted(statements.items())
        if statement.current is None
    }


def _state(seen: str | None) -> str:
    return f"says nothing: it {seen}" if seen else "says nothing: no rank of its host answers, or none has looked"


def _did_last(name: str, statement: Statement | None) -> list[str]:
    if statement is None:
        return [f"  {name}: says nothing"]
    calls = [f"    {call}" for call in statement.calls] or ["    no collective so far"]
    return [f"  {name}: phase {statement.phase} for {statement.seconds:.1f} s", *calls]


def _by_stacks(statements: Mapping[int, Statement]) -> dict[str, list[int]]:
    """Ranks by their place, so that the report shows each place once."""
    found: dict[str, list[int]] = {}
    for rank, statement in sorted(statements.items()):
        found.setdefault(statement.stacks, []).append(rank)
    return found
