"""Tokens sent to the ranks that hold their experts, and the outputs sent back: expert parallelism over replicas.

Each rank has own tokens. A copy of a token goes to all ranks that share the token's expert. Each such rank computes a
share, and the token's rank adds the shares up. Ranks tell each other first how many copies come for which expert, and
read those numbers back from the device once a layer: they are the sizes of the messages.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

from hybridflow.parallel.layout import Place

# (rows (r, hidden) by expert, their shares (r, 1), where each expert's rows end (experts,) int32) -> (r, hidden)
Compute = Callable[[Tensor, Tensor, Tensor], Tensor]


def dispatch_and_combine(
    tokens: Tensor,
    shares: Tensor,
    experts: Tensor,
    *,
    place: Place,
    num_held: int,
    group: dist.ProcessGroup,
    compute: Compute,
) -> Tensor:
    """(t, hidden), (t, k) float32, (t, k) -> (t, hidden): the outputs of this rank's tokens. Collective over `group`.

    place: of this rank; the ranks of `group` hold the parts of the experts in the order of `Cut.places`.
    num_held: whole or cut experts of each rank.
    """
    num_tokens, k = experts.shape
    chosen, order = experts.flatten().sort(stable=True)  # copies of tokens by expert
    numbers = torch.arange(place.ep * num_held, device=chosen.device)
    counts = torch.searchsorted(chosen, numbers, right=True).diff(prepend=numbers.new_zeros(1))
    outgoing = counts.view(place.ep, num_held).repeat_interleave(place.tp, 0)  # (ranks, their experts)
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    sent, received = torch.stack([outgoing.sum(1), incoming.sum(1)]).tolist()
    to_send = torch.cat([run.repeat(place.tp) for run in order.split(sent[:: place.tp])])
    rows = all_to_all(group, tokens[to_send // k], received, sent)
    weights = all_to_all(group, shares.flatten()[to_send, None], received, sent)
    own = torch.arange(num_held, device=chosen.device).repeat(len(sent))
    by_expert = own.repeat_interleave(incoming.flatten(), output_size=sum(received)).argsort(stable=True)
    ends = incoming.sum(0).cumsum(0).to(torch.int32)
    outputs = compute(rows[by_expert], weights[by_expert], ends)
    back = all_to_all(group, outputs[by_expert.argsort()], sent, received).split(sent)
    summed = torch.cat([_sum(back[i : i + place.tp]) for i in range(0, len(back), place.tp)])
    by_token: Tensor = summed[order.argsort()].view(num_tokens, k, -1)
    return by_token.sum(1)


def _sum(shares: tuple[Tensor, ...]) -> Tensor:
    """Of the outputs of ranks that share an expert, in their order."""
    return shares[0] if len(shares) == 1 else torch.stack(shares).sum(0)
