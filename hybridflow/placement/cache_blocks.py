"""The blocks that vLLM hands the engine's cache out in, as vLLM 0.32.0 cuts it for a model's kinds of layers. Pure.

Layers that are alike share a table of blocks: a sequence has a block for every so many tokens there. A gated delta net
keeps one state a sequence, in a block of the same bytes. A layer with a window keeps the last tokens alone, where other
layers have none. vLLM cuts the layers into groups of as many layers each, and a block is of one group at a time:

    bytes of a block = tokens x bytes of a token in a layer x layers of a group
    tokens           = the least multiple of what attention takes, into which a state goes
    with a window    = window - 1 tokens and those of steps that are not over yet, and one block more
"""

from math import ceil
from typing import NamedTuple

from hybridflow.architecture.layer_kinds import Mixer
from hybridflow.architecture.spec import ModelSpec
from hybridflow.errors import ConfigError
from hybridflow.parallel.layout import Stages

STATE_BYTES = 4  # of an element of a delta net's state, whatever the model's dtype


class CacheBlocks(NamedTuple):
    """tokens: of a block of attention. size: bytes of a block on the stage with most layers.

    tables: groups of attention's layers. states: groups of delta nets, of each of which a sequence has one block.
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


def has_window_tables(spec: ModelSpec, stages: Stages) -> bool:
    """Whether layers with windows have tables of their own.

    Not where stages have other shares of them: each rank schedules for itself, and has to come to the same.
    """
    return "window" in spec.mixers and _shares(spec, stages, "window") is not None


def cache_blocks(
    spec: ModelSpec, stages: Stages, *, tp: int, itemsize: int, least_tokens: int, step_tokens: int = 0
) -> CacheBlocks:
    """Of an engine with these stages. least_tokens: what attention takes in a block at least.

    step_tokens: the most tokens of a step. Errors: ConfigError where stages have other shares of gated delta nets.
    """
    token = token_bytes(spec, tp=tp, itemsize=itemsize)  # of a layer
    if has_window_tables(spec, stages):
        assert spec.sliding_window is not None, "layers have windows"
        attention, windows = _shares(spec, stages, "window") or (0, 0)
        group = _layers_of_group(attention, windows)
        reach = spec.sliding_window - 1 + (len(stages) + 1) * step_tokens  # of steps that vLLM has begun at a time
        size, groups = least_tokens * token * group, ceil(attention / group)
        return CacheBlocks(least_tokens, size, groups, windows=ceil(windows / group), reach=reach)
    if spec.delta is None:
        return CacheBlocks(least_tokens, least_tokens * token * max(map(len, stages)))
    shares = _shares(spec, stages, "delta_net")
    if shares is None:
        counts = {_counts(spec, stage, "delta_net") for stage in stages}
        raise ConfigError(
            f"rollout.pipeline_parallel_size = {len(stages)}: the stages of {spec.path} would have {sorted(counts)} "
            "layers of attention and gated delta nets, and each stage must have as many of both as every other"
        )
    attention, states = shares
    group = _layers_of_group(attention, states)
    tokens = least_tokens * ceil(state_bytes(spec, tp=tp, itemsize=itemsize) / (least_tokens * token))
    return CacheBlocks(tokens, tokens * token * group, ceil(attention / group), ceil(states / group))


def token_bytes(spec: ModelSpec, *, tp: int, itemsize: int) -> int:
    """Keys and values of a token in a layer, on a tensor-parallel rank.

    Of latent attention these are made of one vector for all heads, whole on every rank.
    """
    if spec.latent is not None:
        return spec.latent.cached * itemsize
    return 2 * max(1, spec.num_kv_heads // tp) * spec.head_dim * itemsize


def state_bytes(spec: ModelSpec, *, tp: int, itemsize: int) -> int:
    """What a gated delta net keeps of a sequence: the state, and the last inputs of the convolution."""
    assert spec.delta is not None, f"{spec.family} has no gated delta nets"
    inputs = sum(spec.delta.runs) // tp * (spec.delta.kernel - 1)
    return inputs * itemsize + spec.delta.values // tp * spec.delta.key_dim * STATE_BYTES


def _layers_of_group(*counts: int) -> int:
    few, many = sorted(counts)
    return many if many < 1.5 * few else few


def _shares(spec: ModelSpec, stages: Stages, mixer: Mixer) -> tuple[int, int] | None:
    """Of each stage, layers of other mixers and of this one; None: stages differ, or have layers of one kind alone."""
    shares, *others = {_counts(spec, stage, mixer) for stage in stages}
    return None if others or 0 in shares else shares


def _counts(spec: ModelSpec, layers: tuple[int, ...], mixer: Mixer) -> tuple[int, int]:
    such = sum(spec.layer_kind(layer).mixer == mixer for layer in layers)
    return len(layers) - such, such
