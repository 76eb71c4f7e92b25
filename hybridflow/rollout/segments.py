"""What engine replicas add to the rows of partial rollouts, on all ranks: see `rollout.partial`.

own = replica_segments(engine, params, requests, work)             # until enough groups are whole
segments = whole_segments(under_way, own, exchange)                # of all replicas
segments = with_pieces(under_way, segments, own, work)             # and the engine's experts, which stay where they are
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hybridflow.parallel.exchange import Exchange, PartialTensor
from hybridflow.parallel.platform import preserved_random_state
from hybridflow.rollout.engine import Request, Response, RolloutEngine
from hybridflow.rollout.generation import flat
from hybridflow.rollout.partial import CUT, ENDED, RUNNING, ReplicaWork, Segment, UnderWay
from hybridflow.rollout.recorded import RecordedPiece

if TYPE_CHECKING:  # vLLM is imported when its settings stand
    from vllm import SamplingParams


def replica_segments(
    engine: RolloutEngine,
    params: "Sequence[SamplingParams]",
    requests: Mapping[tuple[int, int], Request],
    work: ReplicaWork,
) -> dict[tuple[int, int], Segment]:
    """What the replica adds to rows until enough groups are whole. params: by bucket."""
    names = {
        row: engine.add("{}.{}".format(*row), request, params[request.bucket], max_tokens=None)
        for row, request in requests.items()
    }
    left, whole = Counter(place for place, _ in requests), set[int]()
    found: dict[tuple[int, int], Segment] = {}
    with preserved_random_state():
        while engine.is_busy and not (len(whole) >= work.number and work.urgent <= whole):
            for output in engine.step():
                place, sample = map(int, output.request_id.split("."))
                row = place, sample
                response = engine.response(output.outputs[0], requests[row].prompt, names[row])
                found[row] = _segment(response, CUT if response.truncated else ENDED, requests[row])
                left[place] -= 1
                if not left[place]:
                    whole.add(place)
        for name, response in engine.abort_all():
            place, sample = map(int, name.split("."))
            found[place, sample] = _segment(response, RUNNING, requests[place, sample])
    engine.wait_until_idle()
    return found


def _segment(response: Response, state: int, request: Request) -> Segment:
    """Of the tokens that the engine has read again nothing counts but the last one's experts, which had none before."""
    experts, before = response.experts, len(request.prompt) - 1 if request.num_before else 0
    new = None if experts is None or not response.token_ids else experts[before:]
    new = new.clone() if new is not None and before else new  # what was read again does not stay
    return Segment(response.token_ids, response.log_probs, state, experts=new)


def whole_segments(
    under_way: UnderWay, own: Mapping[tuple[int, int], Segment], exchange: Exchange, num_rewards: int = 0
) -> dict[tuple[int, int], Segment]:
    """Of all replicas: collective. own: what this rank contributes; of a replica one rank does so.

    num_rewards: parts of the reward that an environment gives; 0: there is none.
    """
    rows = [(place, sample) for place, group in enumerate(under_way.groups) for sample in range(len(group.rows))]
    numbers = {row: number for number, row in enumerate(rows)}
    where, parts = torch.tensor([numbers[row] for row in own], dtype=torch.int64), list(own.values())

    def of_rows(values: Sequence[int]) -> PartialTensor:
        return PartialTensor(len(rows), where, torch.tensor(values, dtype=torch.int64))

    counts, states = exchange.gather_all(
        [of_rows([len(part.token_ids) + 1 for part in parts]), of_rows([part.state for part in parts])]
    )  # one more than there are tokens: nobody has touched a row with 0
    sizes = (counts - 1).clamp(min=0)
    starts = sizes.cumsum(0) - sizes
    at = torch.cat(
        [torch.zeros(0, dtype=torch.int64)] + [torch.arange(int(sizes[i])) + starts[i] for i in where.tolist()]
    )
    size = int(sizes.sum())

    def of_tokens(code: str, lists: Iterable[list[Any]]) -> list[list[Any]]:
        whole = exchange.gather(PartialTensor(size, at, flat(code, lists)))
        return [values.tolist() for values in whole.split(sizes.tolist())]

    found: list[list[Any]] = [
        of_tokens("i", (part.token_ids for part in parts)),
        of_tokens("f", (part.log_probs for part in parts)),
    ]
    found.append([int(state) for state in states.tolist()])
    if num_rewards:
        found.append(of_tokens("i", (list(part.flags) for part in parts)))
        found.append(of_tokens("i", (list(part.versions) for part in parts)))
        given = [
            PartialTensor(len(rows), where, torch.tensor([part.rewards[i] for part in parts], dtype=torch.float32))
            for i in range(num_rewards)
        ]
        found.append(torch.stack(exchange.gather_all(given), dim=1).tolist())
    wholes = zip(rows, counts.tolist(), zip(*found, strict=True), strict=True)
    return {row: Segment(*values) for row, count, values in wholes if count}


def with_pieces(
    under_way: UnderWay,
    segments: Mapping[tuple[int, int], Segment],
    own: Mapping[tuple[int, int], Segment],
    work: Sequence[ReplicaWork],
) -> dict[tuple[int, int], Segment]:
    """The segments of all replicas with what every rank knows of the experts of new tokens. Local.

    own: what this rank's replica adds, with the experts that this rank has recorded. work: of each replica.
    """
    made_by = {place: replica for replica, part in enumerate(work) for place in part.groups}
    found = {}
    for (place, sample), segment in segments.items():
        group, known = under_way.groups[place], under_way.groups[place].rows[sample]
        has_experts = len(group.prompt) + len(known.token_ids) - 1 if known.token_ids else 0
        number = len(group.prompt) + len(known.token_ids) + len(segment.token_ids) - 1 - has_experts
        experts = own[place, sample].experts if (place, sample) in own else None
        piece = RecordedPiece(made_by[place], number, experts) if segment.token_ids else None
        found[place, sample] = replace(segment, piece=piece)
    return found
