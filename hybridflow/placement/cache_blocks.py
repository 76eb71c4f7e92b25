"""The blocks that vLLM hands the engine's cache out in, as vLLM 0.32.0 cuts it for a model's kinds of layers. Pure.

Layers that are alike share a table of blocks: a sequence has a block for every so many tokens there. A layer with a
state keeps one a sequence, in a block of the same bytes. A layer with a window keeps the last tokens alone, where other
layers have none. vLLM cuts the layers into groups of as many layers each, and a block is of one group at a time:

    bytes of a block = tokens x bytes of a token in a layer x layers of a group
    tokens           = the least multiple of what attention takes, into which a state goes
    with a window    = window - 1 tokens and those of steps that are not over yet, and one block more
"""

from math import ceil
from typing import NamedTuple

from hybridflow.architecture.mixers.known import cache_kind, mixer_shares
from hybridflow.architecture.mixers.mixer import CacheKind
from hybridflow.architecture.spec import ModelSpec
from hybridflow.errors import ConfigError
from hybridflow.parallel.layout import Stages


class CacheBlocks(NamedTuple):
    """tokens: of a block of attention. size: bytes of a block on the stage with most layers.

    tables: groups of attention's layers. states: groups of layers with a state: one block of a sequence.
    windows: groups of layers that keep `reach` tokens of a sequence.
    """

    tokens: int
    size: int
    tables: int = 1
    states: int = 0
    windows: int = 0
    reach: int = 0

    def of_sequence(self, tokens: int) -> int:
        """Blocks of one sequence of so many tokens."""
        in_window = ceil(min(self.reach, tokens) / self.tokens) + 1
        return self.tables * ceil(tokens / self.tokens) + self.states + self.windows * in_window


def cache_blocks(
    spec: ModelSpec, stages: Stages, *, tp: int, itemsize: int, least_tokens: int, step_tokens: int = 0
) -> CacheBlocks:
    """Of an engine with these stages. least_tokens: what attention takes in a block at least.

    Layers with windows have tables of their own, but where stages have other shares of them: each rank schedules for
    itself, and has to come to the same. step_tokens: the most tokens of a step.

    Errors: ConfigError where stages have other shares of layers with states.
    """
    caches = [mixer.cache(spec, tp=tp, itemsize=itemsize) for mixer in mixer_shares(spec)]
    token, state = max(cache.token for cache in caches), max(cache.state for cache in caches)  # of a layer
    if (shares := _shares(spec, stages, "window")) is not None:
        attention, windows = shares
        group = _layers_of_group(attention, windows)
        window = next(cache.window for cache in caches if cache.window is not None)
        reach = window - 1 + (len(stages) + 1) * step_tokens  # of steps that vLLM has begun at a time
        size, groups = least_tokens * token * group, ceil(attention / group)
        return CacheBlocks(least_tokens, size, groups, windows=ceil(windows / group), reach=reach)
    if not state:
        return CacheBlocks(least_tokens, least_tokens * token * max(map(len, stages)))
    shares = _shares(spec, stages, "state")
    if shares is None:
        [mixer] = (mixer for mixer in mixer_shares(spec) if mixer.cache(spec, tp=tp, itemsize=itemsize).state)
        counts = {_counts(spec, stage, "state") for stage in stages}
        raise ConfigError(
            f"rollout.pipeline_parallel_size = {len(stages)}: the stages of {spec.path} would have {sorted(counts)} "
            f"layers of attention and {mixer.title}, and each stage must have as many of both as every other"
        )
    attention, states = shares
    group = _layers_of_group(attention, states)
    tokens = least_tokens * ceil(state / (least_tokens * token))
    return CacheBlocks(tokens, tokens * token * group, ceil(attention / group), ceil(states / group))


def _layers_of_group(*counts: int) -> int:
    few, many = sorted(counts)
    return many if many < 1.5 * few else few


def _shares(spec: ModelSpec, stages: Stages, kind: CacheKind) -> tuple[int, int] | None:
    """Of each stage, layers that keep otherwise and so; None: stages differ, or have layers of one kind alone."""
    shares, *others = {_counts(spec, stage, kind) for stage in stages}
    return None if others or 0 in shares else shares


def _counts(spec: ModelSpec, layers: tuple[int, ...], kind: CacheKind) -> tuple[int, int]:
    such = sum(cache_kind(spec, layer) == kind for layer in layers)
    return len(layers) - such, such
