"""Seconds of what ranks that share tokens send each other, and of what they make of it, in a layer in the mean. Pure.

Of t tokens of each of c ranks, for each kind of mixer (`models.context`):

    attention   keys and values of all c t tokens
    latent      their narrow vectors, of which each rank makes the heads of all tokens: (c - 1) t more than its own
    window      of each of 2 c pieces of a mean sequence, the last tokens that are in reach
    delta net   inputs and outputs of the own tokens: there and back

Backward the gradients of these. What attention gathers is gathered once more where it is not kept.
"""

from dataclasses import dataclass

from hybridflow.architecture.flops import mixer_products, mixer_shares
from hybridflow.architecture.layer_kinds import Mixer
from hybridflow.architecture.spec import ModelSpec
from hybridflow.automap.cost import Cost, Device, total
from hybridflow.automap.mean_rows import Pass
from hybridflow.placement.context_parallel import gathered_columns


@dataclass(frozen=True)
class ContextWork:
    """A layer's on one of `ranks`, which lie on so many hosts. Nothing is taken off for what runs meanwhile."""

    spec: ModelSpec
    tp: int
    ranks: int
    hosts: int
    dtype: str
    sequence_parallel: bool
    device: Device

    def forward(self, mb: Pass) -> Cost:
        """mb: of the rank."""
        return self._total(mb, gathers=1) + self._heads_of_others(mb)

    def backward(self, mb: Pass, *, kept: bool) -> Cost:
        """kept: what attention has gathered. Else latent attention also makes heads once more, the own ones too."""
        times = 1 if self.spec.lora is not None else 2  # a frozen weight has no gradient
        made = self._heads_of_others(mb).times(times)
        if not kept:
            made += self._heads_of_others(mb).times(self.ranks / (self.ranks - 1))
        return self._total(mb, gathers=1 if kept else 2) + made

    def _total(self, mb: Pass, *, gathers: int) -> Cost:
        """gathers: of attention; the others keep what has arrived."""
        again = {"window": 1, "delta_net": 1}
        return total(
            self._sent(mb, mixer).times(share * again.get(mixer, gathers))
            for mixer, share in mixer_shares(self.spec).items()
        )

    def _heads_of_others(self, mb: Pass) -> Cost:
        """Of latent attention: those of the tokens of the c - 1 other ranks."""
        share = mixer_shares(self.spec).get("latent", 0.0)
        if not share:
            return Cost()
        k, n = mixer_products(self.spec, "latent", tp=self.tp)[2]
        tokens, itemsize = (self.ranks - 1) * mb.tokens, self.device.itemsize(self.dtype)
        cost = self.device.product(tokens, k, n, dtype=self.dtype, busy=self.tp)
        if self.sequence_parallel:  # each has gathered a part of the vectors
            cost += self.device.all_gather(tokens * k * itemsize, self.tp)
        return cost.times(share)

    def _sent(self, mb: Pass, mixer: Mixer) -> Cost:
        tokens = self.ranks * mb.tokens
        if mixer == "delta_net":
            tokens = mb.tokens  # of c ranks each sends (c - 1) / c of them, as where all have 1 / c of what is gathered
        if mixer == "window" and mb.tokens:
            length = 2 * mb.pairs / mb.tokens
            tokens *= min(1.0, 2 * self.ranks * ((self.spec.sliding_window or 1) - 1) / max(length, 1.0))
        if mixer == "latent" and self.sequence_parallel:
            tokens /= self.tp
        size = tokens * gathered_columns(self.spec, mixer, self.tp) * self.device.itemsize(self.dtype)
        return self.device.all_gather(size, self.ranks, hosts=self.hosts, groups=self.tp if self.hosts > 1 else 1)
