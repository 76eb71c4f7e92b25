"""Bytes of the engine's KV cache: what the config gives, or a batch needs; and how many sequences it holds. Pure.

The engine's cache is handed out in blocks, as vLLM 0.32.0 cuts it. Layers that are alike share a table of blocks: a
sequence has a block for every so many tokens. A layer with a state keeps one a sequence, in a block of the same bytes.
A layer with a window keeps the last tokens alone. A block is of one group of equally many layers at a time:

    bytes of a block = tokens x bytes of a token in a layer x layers of a group
    tokens           = the least multiple of what attention takes, into which a state goes
    with a window    = window - 1 tokens and those of steps that are not over yet, and one block more
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from hybridflow.architecture.mixers.known import cache_kind, mixer_shares
from hybridflow.architecture.mixers.mixer import CacheKind
from hybridflow.architecture.spec import ModelSpec
from hybridflow.config import ExperimentConfig
from hybridflow.errors import ConfigError, remedy
from hybridflow.parallel.layout import RolloutLayout, Stages
from hybridflow.placement.footprint import ITEM_BYTES


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
            f"layers of attention and {mixer.title}; each must have as many of both as every other"
            f"{remedy({'rollout.pipeline_parallel_size': [1]})}"
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


GIB = 1 << 30
SOME_SEQUENCES = 8  # at a time, of a replica that is of use


@dataclass(frozen=True)
class KVCacheSize:
    """Bytes of the KV cache on a rank of the engine stage with most layers: the whole, and what one sequence takes.

    own_blocks: that vLLM keeps to itself.
    """

    whole: int
    least: int
    blocks: CacheBlocks  # that it is handed out in
    is_given: bool  # in the config; else the batch says it
    own_blocks: int = 1

    def of_stage(self, stages: Stages, stage: int) -> int:
        """In proportion to the layers of a stage: as many blocks on all.

        Each rank schedules for itself: with more blocks on one stage than on another they would part in a full cache.
        """
        return self.whole * len(stages[stage]) // max(map(len, stages))

    def within(self, free: int) -> "KVCacheSize":
        """No larger than what is free. Errors: ConfigError where that holds no sequence of the longest."""
        if free < self.least:
            raise ConfigError(
                f"rollout.kv_cache_gib is not given, and the {max(free, 0):,} bytes that are free for it on the rank "
                f"with the least free memory cannot hold one sequence of {self.least:,} bytes. `hybridflow plan` shows "
                "the memory of each rank"
            )
        return replace(self, whole=min(self.whole, free))

    def sequences(self, tokens: int) -> int:
        """Of so many tokens, that it holds at a time."""
        return max(0, (self.whole // self.blocks.size - self.own_blocks) // self.blocks.of_sequence(tokens))


def size_kv_cache(
    config: ExperimentConfig, spec: ModelSpec, rollout: RolloutLayout, stages: Stages, *, cuda: bool
) -> KVCacheSize:
    """What kv_cache_gib gives, or what the batch needs by the expected length of responses, in whole blocks. It must
    hold one sequence of the longest.

    vLLM 0.32.0 keeps one block to itself, and one more where attention has a window.
    """
    length, itemsize = config.max_sequence_length, ITEM_BYTES[config.actor.dtype]
    least_tokens = tokens_of_block(spec, cuda=cuda)
    step_tokens = config.rollout.batched_tokens(length, cuda=cuda)
    sizes = {"itemsize": itemsize, "least_tokens": least_tokens, "step_tokens": step_tokens}
    blocks = cache_blocks(spec, stages, tp=rollout.tp, **sizes)
    own_blocks = 2 if spec.sliding_window and not blocks.windows else 1
    blocks_of_one = blocks.of_sequence(length)
    num_blocks = blocks_of_one + own_blocks
    needed = num_blocks * blocks.size
    rows = config.rows_of_replica(len(rollout.replicas))
    sequences = min(rows, config.rollout.sequences_of_step(rows, cuda=cuda))
    if config.rollout.kv_cache_gib is None:
        expected = blocks.of_sequence(config.data.max_prompt_length + config.sampling.mean_response_length)
        whole = max(sequences * expected, blocks_of_one) + own_blocks
        return KVCacheSize(whole * blocks.size, needed, blocks, False, own_blocks)
    given = int(config.rollout.kv_cache_gib * GIB)
    if given < needed:
        some = min(sequences, SOME_SEQUENCES)
        enough = gib_of((some * blocks_of_one + own_blocks) * blocks.size)
        raise ConfigError(
            f"rollout.kv_cache_gib = {config.rollout.kv_cache_gib:g} ({given:,} bytes) cannot hold one sequence of "
            f"data.max_prompt_length + sampling.max_response_length = {length} tokens. An engine rank needs "
            f"{num_blocks} blocks ({own_blocks} of them vLLM's own) of "
            f"{_words(spec, blocks, stages, rollout, itemsize)} = {needed:,} bytes. "
            f"rollout.kv_cache_gib={enough} holds {some} of the longest at a time, rollout.kv_cache_gib="
            f"{gib_of(needed)} one; with rollout.kv_cache_gib=null the batch and the free memory decide"
        )
    return KVCacheSize(given, needed, blocks, True, own_blocks)


def _words(spec: ModelSpec, blocks: CacheBlocks, stages: Stages, rollout: RolloutLayout, itemsize: int) -> str:
    if blocks.states:
        of_states = f"a sequence has {blocks.states} for states, and one for every {blocks.tokens} tokens"
        return f"{blocks.size:,} bytes ({of_states})"
    if blocks.windows:
        whole = f"a sequence has {blocks.tables} for every {blocks.tokens} tokens"
        return f"{blocks.size:,} bytes ({whole}, and {blocks.windows} for as many of the last {blocks.reach:,} tokens)"
    factors = next(iter(mixer_shares(spec))).cache_words(spec, tp=rollout.tp, layers=max(map(len, stages)))
    return f"{blocks.tokens} tokens x {factors} x {itemsize} bytes"


def tokens_of_block(spec: ModelSpec, *, cuda: bool) -> int:
    return max(mixer.block_tokens(cuda=cuda) for mixer in mixer_shares(spec))


def gib_of(num_bytes: int) -> str:
    """As many GiB as a config may say, with four digits and no less than the bytes."""
    gib = num_bytes / GIB
    digits = f"{gib:.3e}"
    if int(float(digits) * GIB) < num_bytes:
        mantissa, exponent = digits.split("e")
        digits = f"{float(mantissa) + 0.001:.3f}e{exponent}"
    return f"{float(digits):.10f}".rstrip("0").rstrip(".")
