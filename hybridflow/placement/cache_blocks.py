"""The blocks that vLLM hands the engine's cache out in, as vLLM 0.32.0 cuts it for a model's kinds of layers. Pure.

Layers that are alike share a table of blocks: a sequence has a block for every so many tokens there. A gated delta net
keeps one state a sequence, in a block of the same bytes. vLLM cuts the layers into groups of as many layers each, and a
block is of one layer of each group at a time:

    bytes of a block = tokens x bytes of a token in a layer x layers of a group
    tokens           = the least multiple of what attention takes, into which a state goes
"""

from math import ceil
from typing import NamedTuple

from hybridflow.architecture.spec import ModelSpec
from hybridflow.errors import ConfigError
from hybridflow.parallel.layout import Stages

STATE_BYTES = 4  # of an element of a delta net's state, whatever the model's dtype


class CacheBlocks(NamedTuple):
    """tokens: of a block of attention. size: bytes of a block on the stage with most layers.

    tables: groups of attention's layers. states: groups of other layers, of each of which a sequence has one block.
    """

    tokens: int
    size: int
    tables: int = 1
    states: int = 0

    def of_sequence(self, tokens: int) -> int:
        """Blocks of one sequence of so many tokens."""
        return self.tables * ceil(tokens / self.tokens) + self.states


def cache_blocks(spec: ModelSpec, stages: Stages, *, tp: int, itemsize: int, least_tokens: int) -> CacheBlocks:
    """Of an engine with these stages. least_tokens: what attention takes in a block at least.

    Errors: ConfigError where stages have other shares of each kind of layer: each rank schedules for itself.
    """
    token = token_bytes(spec, tp=tp, itemsize=itemsize)  # of a layer
    if spec.delta is None:
        return CacheBlocks(least_tokens, least_tokens * token * max(map(len, stages)))
    counts = {tuple(_counts(spec, stage)) for stage in stages}
    if len(counts) > 1 or 0 in next(iter(counts)):
        raise ConfigError(
            f"rollout.pipeline_parallel_size = {len(stages)}: the stages of {spec.path} would have {sorted(counts)} "
            "layers of attention and gated delta nets, and each stage must have as many of both as every other"
        )
    attention, states = next(iter(counts))
    few, many = sorted((attention, states))
    group = many if many < 1.5 * few else few
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


def _counts(spec: ModelSpec, layers: tuple[int, ...]) -> tuple[int, int]:
    """Layers with keys and values, and layers with a state."""
    states = sum(spec.layer_kind(layer).mixer == "delta_net" for layer in layers)
    return len(layers) - states, states
