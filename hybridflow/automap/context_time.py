"""Seconds of what ranks that share tokens send each other, and of what they make of it, in a layer in the mean. Pure.

What each kind of mixer sends of its tokens, and makes of others', says the mixer (`architecture.mixers`).
Backward the gradients of these. What attention gathers is gathered once more where it is not kept.
"""

from dataclasses import dataclass

from hybridflow.architecture.mixers.known import mixer_shares
from hybridflow.architecture.mixers.mixer import TokenMixer
from hybridflow.architecture.spec import ModelSpec
from hybridflow.automap.cost import Cost, Device, total
from hybridflow.automap.mean_rows import Pass


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
        """gathers: of mixers that gather again; the others keep what has arrived."""
        return total(
            self._sent(mb, mixer).times(share * (gathers if mixer.gathers_again else 1))
            for mixer, share in mixer_shares(self.spec).items()
        )

    def _heads_of_others(self, mb: Pass) -> Cost:
        """What a rank makes of the tokens of the c - 1 other ranks, where a mixer has it so."""
        found = list[Cost]()
        for mixer, share in mixer_shares(self.spec).items():
            if (product := mixer.remade(self.spec, self.tp)) is None:
                continue
            tokens, itemsize = (self.ranks - 1) * mb.tokens, self.device.itemsize(self.dtype)
            cost = self.device.product(tokens, *product, dtype=self.dtype, busy=self.tp)
            if self.sequence_parallel:  # each has gathered a part of the vectors
                cost += self.device.all_gather(tokens * product[0] * itemsize, self.tp)
            found.append(cost.times(share))
        return total(found)

    def _sent(self, mb: Pass, mixer: TokenMixer) -> Cost:
        split = self.tp if self.sequence_parallel else 1
        tokens = mixer.context_tokens(self.spec, tokens=mb.tokens, pairs=mb.pairs, ranks=self.ranks, split=split)
        size = tokens * mixer.context_columns(self.spec, self.tp) * self.device.itemsize(self.dtype)
        return self.device.all_gather(size, self.ranks, hosts=self.hosts, groups=self.tp if self.hosts > 1 else 1)
