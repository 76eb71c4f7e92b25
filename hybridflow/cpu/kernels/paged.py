"""Attention of an engine on a CPU over a cache of keys and values in blocks: `paged.c`, called.

PagedAttention (Kwon et al. 2023). A head of a block holds the keys, a row a token, and then the values, so that what a
token adds is two runs of memory. bfloat16 is read and written, sums are float32; they depend neither on the number of
threads nor on what else the cache holds.
"""

import ctypes

import torch
from torch import Tensor

from hybridflow.cpu.kernels.library import fields, library, run

TOKENS = 16  # that a thread writes into the cache at a time: of paged.c
STEP = 16  # a block's tokens and a head's dimensions are multiples of it


class Paged(ctypes.Structure):
    """That of paged.c."""

    _fields_ = fields(
        ["query", "key", "value", "cache", "out", "table", "starts", "lengths", "slots", "next"],
        [
            *("sequences", "tokens", "longest", "table_row", "heads", "kv_heads", "dims", "block_size"),
            *("query_token", "query_head", "key_token", "key_head", "value_token", "value_head"),
            *("out_token", "out_head", "cache_block", "cache_head", "bfloat16"),
        ],
        "scale",
    )


def store(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write the keys and values of tokens (tokens, kv_heads, head_dim), of the cache's dtype, into the cache.

    cache: (blocks, kv_heads, block_size, 2 head_dim), dense within a head of a block. slots: (tokens,) int64, block x
    block_size + the place in it; negative for none.
    """
    kernels = library()
    assert kernels is not None, "a process without kernels does not come here"
    assert slots.dtype == torch.int64 and key.dtype == value.dtype == cache.dtype, "as the kernel reads them"
    assert key.stride(-1) == value.stride(-1) == 1, "as the kernel reads them"
    tokens = len(slots)
    arguments = Paged(
        key=key.data_ptr(),
        value=value.data_ptr(),
        cache=cache.data_ptr(),
        slots=slots.data_ptr(),
        tokens=tokens,
        key_token=key.stride(0),
        key_head=key.stride(1),
        value_token=value.stride(0),
        value_head=value.stride(1),
        **_of_cache(cache),
    )
    run(kernels.hybridflow_paged_store, arguments, -(-tokens // TOKENS))


def attend(
    query: Tensor,
    cache: Tensor,
    out: Tensor,
    *,
    table: Tensor,
    starts: Tensor,
    lengths: Tensor,
    longest: int,
    scale: float,
) -> None:
    """out (tokens, heads, head_dim): softmax(scale q k) v over the keys of a query's sequence up to the query's own.

    table: (sequences, blocks of the longest) int32, the blocks of each. starts: (sequences + 1,) int32, where the
    queries of each begin; they are the last tokens. lengths: (sequences,) int32, tokens of each. longest: at least
    the largest of them.
    """
    kernels = library()
    assert kernels is not None, "a process without kernels does not come here"
    assert table.dtype == starts.dtype == lengths.dtype == torch.int32, "as the kernel reads them"
    assert query.dtype == out.dtype == cache.dtype and query.stride(-1) == out.stride(-1) == 1, (
        "as the kernel reads them"
    )
    arguments = Paged(
        query=query.data_ptr(),
        cache=cache.data_ptr(),
        out=out.data_ptr(),
        table=table.data_ptr(),
        starts=starts.data_ptr(),
        lengths=lengths.data_ptr(),
        sequences=len(lengths),
        longest=longest,
        table_row=table.stride(0),
        heads=query.shape[1],
        query_token=query.stride(0),
        query_head=query.stride(1),
        out_token=out.stride(0),
        out_head=out.stride(1),
        scale=scale,
        **_of_cache(cache),
    )
    run(kernels.hybridflow_paged_attention, arguments, len(lengths) * cache.shape[1])


def _of_cache(cache: Tensor) -> dict[str, int]:
    _, kv_heads, block_size, both = cache.shape
    block, head, *_ = cache.stride()
    return {
        "kv_heads": kv_heads,
        "dims": both // 2,
        "block_size": block_size,
        "cache_block": block,
        "cache_head": head,
        "bfloat16": cache.dtype == torch.bfloat16,
    }
