"""Seconds of a mixture of experts on a rank: router, products of the experts, and the way of their tokens. Pure.

With t tokens on each tp rank, k of E experts a token, and ep runs of E / ep experts, each shared by etp ranks:

    rows       t k etp / tp of a rank in the mean; the rank with most has them times the imbalance
    products   E / ep experts, each of as many of the rows: (h, 2 f / etp) and (f / etp, h), in one kernel
    messages   where etp x ep > tp, each rank sends a token once to each rank that holds one of the token's experts, and
               an output comes back from there: of n = E / ep experts a run, ep (1 - C(E - n, k) / C(E, k)) runs a token

Imbalance is the load of the fullest of ep runs over the mean. With loads of single experts that spread by a share s of
their mean, a run of n experts spreads by s / sqrt(n), and of ep normal values the largest is about sqrt(2 ln ep) above:

    1 + s sqrt(ep / E) sqrt(2 ln ep)
"""

from dataclasses import dataclass
from math import comb, log, sqrt

from hybridflow.architecture.spec import ModelSpec
from hybridflow.automap.cost import Cost, Device, total
from hybridflow.parallel.layout import Cut

SPREAD = 0.5  # standard deviation of the experts' loads over their mean; assumed, not measured
PASSES_WITHIN = 5  # of a row: gathered by expert (2), outputs back by token (2), their sum
PASSES_OF_SENDERS = 4  # besides: gathered by rank, and sorted once more where they arrive
ROUTER_BYTES = 16  # of a logit: written, softmax in float32, the k largest


@dataclass(frozen=True)
class ExpertWork:
    """One layer's experts on one rank of `cut`."""

    spec: ModelSpec
    cut: Cut
    dtype: str
    device: Device

    @property
    def ep_ranks(self) -> int:
        """Ranks that send each other tokens; 1: the ranks of a replica have them all."""
        ranks = self.cut.expert_tp * self.cut.ep
        return ranks if ranks > self.cut.tp else 1

    @property
    def imbalance(self) -> float:
        """Of the run of experts with most tokens over the mean."""
        ep, experts = self.cut.ep, self.spec.num_experts
        return 1 + SPREAD * sqrt(ep / experts) * sqrt(2 * log(ep))

    @property
    def copies(self) -> float:
        """Rows a token that the rank with most multiplies."""
        return self.spec.experts_per_token * self.cut.expert_tp / self.cut.tp * self.imbalance

    @property
    def matrices(self) -> list[tuple[float, float]]:
        """(k, n) of an expert on a rank."""
        hidden, width = float(self.spec.hidden_size), self.spec.ffn_hidden_size / self.cut.expert_tp
        return [(hidden, (2 if self.spec.traits.mlp.gated else 1) * width), (width, hidden)]

    def held(self, tokens: float) -> float:
        """Experts of a rank that some of so many tokens on each sender choose, all alike in favour."""
        spec, seen = self.spec, tokens * max(1.0, self.ep_ranks / self.cut.tp)
        missed: float = (1 - spec.experts_per_token / spec.num_experts) ** seen
        return spec.num_experts / self.cut.ep * (1 - missed)

    def products(self, tokens: float, *, backward: bool = False) -> Cost:
        """The experts' own; backward two for each of forward."""
        held = self.held(tokens)
        rows = tokens * self.copies / held
        shapes = [(rows, k, n) for k, n in self.matrices]
        if backward:
            shapes = [shape for rows, k, n in shapes for shape in ((rows, n, k), (n, rows, k))]
        return total(self.device.grouped(*shape, held, dtype=self.dtype, busy=self.cut.tp) for shape in shapes)

    def elementwise_bytes(self) -> float:
        """A token's, forward: rows on their way to their experts and back, activations, the router's shares."""
        spec, itemsize = self.spec, self.device.itemsize(self.dtype)
        passes = PASSES_WITHIN + (PASSES_OF_SENDERS if self.ep_ranks > 1 else 0)
        rows = itemsize * self.copies * passes * spec.hidden_size
        return rows + self.activation_bytes() + ROUTER_BYTES * spec.num_experts

    def activation_bytes(self) -> float:
        """Of `elementwise_bytes`, those of activations."""
        width = (5 if self.spec.traits.mlp.gated else 2) * self.spec.ffn_hidden_size / self.cut.expert_tp
        return self.device.itemsize(self.dtype) * self.copies * width

    @property
    def runs(self) -> float:
        """Of a token in the mean: runs of experts with one that the token chooses, all choices alike."""
        experts, chosen = self.spec.num_experts, self.spec.experts_per_token
        held = experts // self.cut.ep
        return self.cut.ep * (1 - comb(experts - held, chosen) / comb(experts, chosen))

    def messages(self, tokens: float) -> Cost:
        """Of a rank's own tokens to the ranks that share their experts, and outputs back: each an all-to-all."""
        if self.ep_ranks == 1:
            return Cost()
        rows = tokens * self.runs * self.cut.expert_tp * self.imbalance
        size = rows * self.spec.hidden_size * self.device.itemsize(self.dtype)
        return self.device.all_to_all(size, self.ep_ranks).times(2, busy=self.cut.tp)
