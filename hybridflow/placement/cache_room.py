"""The size of the KV cache where the config gives none: what the batch needs, or what there is room for. Pure.

    run = with_room(place(config, 8), 80 << 30)       a default that is larger than what is free becomes that
    cache_words(run), cache_report(run)               bytes, and how many sequences they hold

Of the memory of a GPU there stays free what libraries take: see `margin`.
"""

from dataclasses import replace
from math import ceil
from typing import Any, TypeVar

from hybridflow.placement.footprint import together
from hybridflow.placement.forecast import RunMemory
from hybridflow.placement.kv_cache import KVCacheSize
from hybridflow.placement.margin import Margins
from hybridflow.placement.placed import PlacedModels, PlacedRun

GIB = 1 << 30
Run = TypeVar("Run", PlacedRun, PlacedModels)


def with_room(run: Run, room: int) -> Run:
    """With a default cache that goes into so many bytes a rank beside all else, libraries too; one sequence at least.

    What the config gives stays as it is.
    """
    if not isinstance(run, PlacedRun) or run.kv_cache.is_given:
        return run
    size = max(min(run.kv_cache.whole, bytes_left(run, room)), run.kv_cache.least)
    return replace(run, kv_cache=replace(run.kv_cache, whole=size))


def bytes_left(run: PlacedRun, room: int) -> int:
    """For the cache of the largest stage, such that no rank holds more than the room; negative: there is none."""
    memory, whole = RunMemory(run), run.kv_cache.whole
    found = []
    for rows_of in memory.moments().values():
        for rank in memory.one_of_each():
            rows = rows_of(rank)
            own = rows["engine"].kv_cache if "engine" in rows else 0
            if own:  # a stage with fewer layers has a part
                held = together(list(rows.values())).total + memory.margin(rank).total
                found.append((room - held + own) * whole // own)
    return min(found)


def sized_here(run: PlacedRun, *, memory: int, free: int, beside: int) -> KVCacheSize:
    """On GPUs: of the rank that has least. memory: of the device; free: now; beside: what the engine takes in a step.

    Errors: ConfigError where a default cache would hold no sequence.
    """
    if run.kv_cache.is_given:
        return run.kv_cache
    return run.kv_cache.within(min(bytes_left(run, memory), free - beside - reserve(run, warmed=True)))


def reserve(run: PlacedRun, *, warmed: bool = False) -> int:
    """Bytes for libraries, on the rank of the engine that has most of them. warmed: context and groups are there."""
    margins = [Margins(run)(rank) for rank in run.rollout.ranks]
    return max(margin.graphs + margin.workspaces if warmed else margin.total for margin in margins)


def cache_report(run: PlacedRun, size: KVCacheSize | None = None) -> dict[str, Any]:
    """Of an engine rank of the largest stage; sequences of a replica that the blocks hold at a time."""
    size = size or run.kv_cache
    sampling, prompt = run.config.sampling, run.config.data.max_prompt_length
    longest, expected = run.config.max_sequence_length, prompt + sampling.mean_response_length
    return {
        "bytes": size.whole,
        "is_given": size.is_given,
        "longest_tokens": longest,
        "longest_sequences": size.sequences(longest),
        "longest_bytes": size.blocks.of_sequence(longest) * size.blocks.size,
        "prompt_steps": ceil(prompt / run.config.rollout.batched_tokens(longest, cuda=run.cuda)),
        "expected_tokens": expected,
        "expected_sequences": size.sequences(expected),
        "reserve_bytes": 0 if size.is_given else reserve(run),
    }


def cache_words(run: PlacedRun, size: KVCacheSize | None = None, *, bounded: bool = True) -> str:
    """A line for people. bounded: whether a default goes by the memory there is."""
    found = cache_report(run, size)
    whose = "given" if found["is_given"] else "default"
    reserve = f", {found['reserve_bytes'] / GIB:.3g} GiB stay free" if bounded and found["reserve_bytes"] else ""
    longest = f"{found['longest_sequences']:,} sequences of the longest {found['longest_tokens']:,} tokens"
    expected = f"{found['expected_sequences']:,} of the expected {found['expected_tokens']:,}"
    words = f"KV cache: {found['bytes'] / GIB:.4g} GiB a rank ({whose}{reserve}): {longest}, {expected}"
    if bounded or found["is_given"]:
        return words
    return f"{words}. This is what the batch needs, as no device memory is known: a run takes at most what is free"


def long_words(run: PlacedRun, size: KVCacheSize | None = None) -> str:
    """A line for people: whether the engine can generate at the longest length."""
    found, config = cache_report(run, size), run.config
    ranks = "the engine's rank" if run.rollout.tp == 1 else f"each of the {run.rollout.tp} tensor-parallel ranks"
    takes = f"One of the longest sequences takes {found['longest_bytes'] / GIB:.4g} GiB of {ranks}"
    if found["prompt_steps"] == 1:
        return takes
    tokens = config.rollout.batched_tokens(found["longest_tokens"], cuda=run.cuda)
    return (
        f"{takes}. The engine reads a prompt of {config.data.max_prompt_length:,} tokens in {found['prompt_steps']:,} "
        f"steps of at most {tokens:,} tokens: rollout.max_num_batched_tokens"
    )
