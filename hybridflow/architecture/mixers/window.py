"""Attention that reaches back `sliding_window` tokens, itself included (Beltagy et al. 2020).

flops      of at most w pairs a token: the first tokens of a sequence reach fewer
cache      the last w tokens
context    of each of the 2 c pieces of a row, the last w - 1 tokens before it travel. Own keys and values, and those in
           reach, are there as they are and in float32; backward, gradients of both
"""

from hybridflow.architecture.mixers.attention import SUM_BYTES, AttentionMixer
from hybridflow.architecture.mixers.mixer import LayerCache
from hybridflow.architecture.spec import ModelSpec


class WindowMixer(AttentionMixer):
    title, gathers_again = "attention with windows", False

    def flops(self, spec: ModelSpec, *, pairs: float, tokens: float) -> float:
        return super().flops(spec, pairs=min(pairs, tokens * _window(spec)), tokens=tokens)

    def cache(self, spec: ModelSpec, *, tp: int, itemsize: int) -> LayerCache:
        return super().cache(spec, tp=tp, itemsize=itemsize)._replace(window=_window(spec))

    def context_tokens(self, spec: ModelSpec, *, tokens: float, pairs: float, ranks: int, split: int) -> float:
        if not tokens:
            return 0.0
        length = 2 * pairs / tokens
        return ranks * tokens * min(1.0, 2 * ranks * (_window(spec) - 1) / max(length, 1.0))

    def context_bytes(self, spec: ModelSpec, *, tp: int, ranks: int, itemsize: int, tokens: int, backward: bool) -> int:
        ends = min(tokens, 2 * (_window(spec) - 1))  # of one sequence: of several there are more
        elements = 2 * (SUM_BYTES + itemsize) * tokens + (SUM_BYTES + ranks * itemsize) * ends
        return (2 if backward else 1) * self.context_columns(spec, tp) * elements


def _window(spec: ModelSpec) -> int:
    assert spec.sliding_window is not None, f"{spec.family} has no windows"
    return spec.sliding_window
