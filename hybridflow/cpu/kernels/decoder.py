"""A layer of a decoder for the next tokens of an engine on a CPU, by one call: `decoder.c`, called.

    residual += x                                                  (of the first layer x is the residual)
    residual += out(attention(rotated q, rotated k, v))            with (q, k, v) = qkv(norm(residual))
    y = down(swiglu(gate_up(norm(residual))))

by the kernels of `layers.py`, `linear.py` and `paged.py`, one after the other, in this thread: with few tokens, what
Python and torch do between these is no small part of a step.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.cpu.kernels.library import fields, library
from hybridflow.cpu.kernels.linear import units_pay

KINDS = ("products", "attention", "elementwise")  # of work, whose seconds decoder.c tells apart
WEIGHTS = (
    *("first_norm", "qkv", "qkv_bias", "query_norm", "key_norm", "out", "out_bias"),
    *("second_norm", "gate_up", "gate_up_bias", "down", "down_bias"),
)


class Decoder(ctypes.Structure):
    """That of decoder.c."""

    _fields_ = fields(
        [
            *("x", "residual", "y", "positions", "rotation", "cache", "table", "starts", "lengths", "slots"),
            *(*WEIGHTS, "seconds"),
        ],
        [
            *("rows", "first", "width", "heads", "kv_heads", "dims", "turning", "hidden"),
            *("sequences", "longest", "table_row", "block_size", "cache_block", "cache_head", "bfloat16", "units"),
        ],
        *("eps", "scale"),
    )


@dataclass(frozen=True)
class Sizes:
    """width: of what goes from layer to layer. hidden: of the MLP. scale: of the scores of attention.

    turning: dimensions i and i + turning of a head turn together, those from 2 turning on stay.
    """

    width: int
    heads: int
    kv_heads: int
    dims: int
    turning: int
    hidden: int
    eps: float
    scale: float


@dataclass(frozen=True)
class Keys:
    """What of a step attention and the cache need: see `paged.store` and `paged.attend`."""

    cache: Tensor
    table: Tensor
    starts: Tensor
    lengths: Tensor
    slots: Tensor
    longest: int


@dataclass(frozen=True)
class Given:
    """What a call has read and written that nobody else need keep."""

    x: Tensor
    residual: Tensor
    y: Tensor
    rotation: Tensor


class DecoderLayer:
    """One layer; the layer's arguments stay from step to step."""

    given: Given  # of the last call

    def __init__(self, sizes: Sizes, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._arguments = Decoder(**vars(sizes), bfloat16=dtype == torch.bfloat16)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        weights: Mapping[str, Tensor],
        *,
        positions: Tensor,
        rotation: Tensor,
        keys: Keys,
        seconds: "ctypes.Array[ctypes.c_double] | None" = None,
    ) -> tuple[Tensor, Tensor]:
        """(y, residual), which is updated in place; None for the first layer, whose x it then is.

        Args:
            x: (tokens, width), dense, as residual.
            weights: by the names of `WEIGHTS`, dense; (outputs, inner) where they multiply. There may be no biases, and
                no norms of heads.
            positions: (tokens,) int64, the rows of `rotation` (positions, 2 turning): cosines, then sines.
            seconds: of each of `KINDS`, to which what this takes is added.
        """
        a = self._arguments
        assert x.dtype == rotation.dtype == keys.cache.dtype == self._dtype and x.is_contiguous(), "as they are read"
        assert positions.dtype == keys.slots.dtype == torch.int64 and positions.is_contiguous(), "as they are read"
        assert keys.table.dtype == keys.starts.dtype == keys.lengths.dtype == torch.int32, "as they are read"
        a.first = residual is None
        residual = x if residual is None else residual.contiguous()
        y = torch.empty_like(x)
        a.x, a.residual, a.y, a.rows = x.data_ptr(), residual.data_ptr(), y.data_ptr(), len(x)
        a.positions, a.rotation = positions.data_ptr(), rotation.data_ptr()
        a.cache, a.table, a.table_row = keys.cache.data_ptr(), keys.table.data_ptr(), keys.table.stride(0)
        a.cache_block, a.cache_head = keys.cache.stride(0), keys.cache.stride(1)
        a.block_size = keys.cache.shape[2]
        a.starts, a.lengths, a.slots = keys.starts.data_ptr(), keys.lengths.data_ptr(), keys.slots.data_ptr()
        a.sequences, a.longest = len(keys.lengths), keys.longest
        a.units = units_pay(len(x), self._dtype)
        for name in WEIGHTS:
            weight = weights.get(name)
            setattr(a, name, None if weight is None else weight.data_ptr())
        self.given = Given(x, residual, y, rotation)
        self.compute(seconds)
        return y, residual

    def again(self, longest: int) -> None:
        """As in the call before, with what the same memory now holds; longest: as in `Keys`."""
        self._arguments.longest = longest
        self.compute()

    def compute(self, seconds: "ctypes.Array[ctypes.c_double] | None" = None) -> None:
        """What the arguments say."""
        kernels, a = library(), self._arguments
        assert kernels is not None, "a process without kernels does not come here"
        a.seconds = None if seconds is None else ctypes.addressof(seconds)
        if kernels.hybridflow_decoder(ctypes.byref(a)):
            raise MemoryError("a layer of a decoder on the CPU found no memory to compute in")
