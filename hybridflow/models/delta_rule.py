"""The gated delta rule, and the causal convolution in front of it, over packed sequences. Plain torch, for any device.

Of a head with the state S (dk, dv), at the tokens t of a sequence (Yang et al. 2024, arXiv 2412.06464, equation 10):

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T,      o_t = S_t^T q_t / sqrt(dk)

with queries and keys of length 1, decays g <= 0 and rates beta. Within a chunk of C tokens all is products (section 3.3
there): with G the sums of g within the chunk and T = (1 + tril(beta k k^T exp(G_i - G_j)))^-1,

    u = T (beta v) - T (beta exp(G) k) S,     o = exp(G) q S + tril(q k^T exp(G_i - G_j)) u,
    S <- exp(G_C) S + (exp(G_C - G) k)^T u

S is zero where a sequence begins, or what the sequence's parent has left: a prompt that several responses share.

Axes of tensors, as suffixes of names: t tokens, s sequences, n chunks, c tokens of a chunk, h value heads, k and v the
sizes dk and dv. Queries and keys of the functions that others call have key heads, of which value heads share one.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

CHUNK = 64
NO_PARENT = -1
# (query, key (t, hk, dk), value (t, hv, dv), decay, rate (t, hv), sequences) -> (t, hv, dv)
DeltaRule = Callable[..., Tensor]


class Sequences(NamedTuple):
    """Where packed sequences lie, and which earlier one each continues, by number; NO_PARENT: none."""

    lengths: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def levels(self) -> list[list[int]]:
        """Numbers of the sequences without parents, then of those whose parents are among these, ..."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == NO_PARENT else depths[parent] + 1)
        return [[i for i, depth in enumerate(depths) if depth == level] for level in range(max(depths) + 1)]


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, *, sequences: Sequences
) -> Tensor:
    """(t, hk, dk) queries and keys of any length, (t, hv, dv) values, (t, hv) decays and rates -> (t, hv, dv).

    hv is a multiple of hk: value heads in a row share a key head. Computed in float32 or wider.
    """
    return delta_rule_with_states(query, key, value, decay, rate, sequences=sequences)[0]


def delta_rule_with_states(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    rate: Tensor,
    *,
    sequences: Sequences,
    states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same, and what each sequence leaves: (sequences, hv, dk, dv). states: that they begin with."""
    wide, num_chunks = torch.promote_types(value.dtype, torch.float32), [-(-n // CHUNK) for n in sequences.lengths]
    shared = value.shape[1] // key.shape[1]
    q_thk, k_thk = (unit(x.to(wide)).repeat_interleave(shared, 1) for x in (query, key))
    place_t = _places(sequences.lengths, value.device)
    tensors = (q_thk * q_thk.shape[-1] ** -0.5, k_thk, value, decay, rate)
    q_nhck, k_nhck, v_nhcv, g_nhc, beta_nhc = (_in_chunks(x.to(wide), place_t, sum(num_chunks)) for x in tensors)
    chunks = _within_chunks(q_nhck, k_nhck, v_nhcv, g_nhc.cumsum(-1), beta_nhc)
    firsts = [sum(num_chunks[:i]) for i in range(len(num_chunks))]
    outputs: list[Tensor] = [v_nhcv] * sum(num_chunks)  # (h, c, v) of each chunk
    zero_hkv = v_nhcv.new_zeros(value.shape[1], k_nhck.shape[-1], value.shape[-1])
    left: dict[int, Tensor] = {}  # the state S, (h, k, v), of each sequence
    for level in sequences.levels:
        for i in level:
            parent = sequences.parents[i]
            left[i] = zero_hkv if parent == NO_PARENT else left[parent]
            if states is not None:
                left[i] = states[i].to(wide)
        for step in range(max(num_chunks[i] for i in level)):
            running = [i for i in level if step < num_chunks[i]]
            numbers = torch.tensor([firsts[i] + step for i in running], device=value.device)
            o_shcv, after_shkv = chunks.step(numbers, torch.stack([left[i] for i in running]))
            for i, number, of_chunk, state in zip(running, numbers.tolist(), o_shcv, after_shkv, strict=True):
                outputs[number], left[i] = of_chunk, state
    o_thv = torch.stack(outputs).transpose(1, 2).flatten(0, 1)[place_t]
    return o_thv.to(value.dtype), torch.stack([left[i] for i in range(len(num_chunks))])


def unit(x: Tensor) -> Tensor:
    """Of length 1 along the last dimension, but for an epsilon that transformers and vLLM have."""
    scaled: Tensor = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    return scaled


class _Chunks(NamedTuple):
    """What of the chunks does not depend on the state."""

    u_nhcv: Tensor  # T (beta v)
    w_nhck: Tensor  # T (beta exp(G) k)
    q_nhck: Tensor  # exp(G) q
    pairs_nhcc: Tensor  # tril(q k^T exp(G_i - G_j))
    k_nhck: Tensor  # exp(G_C - G) k
    decay_nh11: Tensor  # exp(G_C)

    def step(self, numbers: Tensor, s_shkv: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of these chunks, (s, h, c, v), and the states behind them, from the states before them."""
        u_shcv = self.u_nhcv[numbers] - self.w_nhck[numbers] @ s_shkv
        o_shcv = self.q_nhck[numbers] @ s_shkv + self.pairs_nhcc[numbers] @ u_shcv
        return o_shcv, s_shkv * self.decay_nh11[numbers] + self.k_nhck[numbers].mT @ u_shcv


def _within_chunks(q_nhck: Tensor, k_nhck: Tensor, v_nhcv: Tensor, g_nhc: Tensor, beta_nhc: Tensor) -> _Chunks:
    """g_nhc: G, summed up within the chunk."""
    later_cc = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q_nhck.device).triu(1)
    decay_nhcc = (g_nhc[..., :, None] - g_nhc[..., None, :]).masked_fill(later_cc, float("-inf")).exp()
    beta_k_nhck = k_nhck * beta_nhc[..., None]
    system_nhcc = (beta_k_nhck @ k_nhck.mT) * decay_nhcc  # T is the inverse of 1 + this
    u_nhcv, w_nhck = (
        torch.linalg.solve_triangular(system_nhcc, x, upper=False, unitriangular=True)
        for x in (v_nhcv * beta_nhc[..., None], beta_k_nhck * g_nhc.exp()[..., None])
    )
    end_nh1 = g_nhc[..., -1:]
    return _Chunks(
        u_nhcv,
        w_nhck,
        q_nhck=q_nhck * g_nhc.exp()[..., None],
        pairs_nhcc=(q_nhck @ k_nhck.mT) * decay_nhcc,
        k_nhck=k_nhck * (end_nh1 - g_nhc).exp()[..., None],
        decay_nh11=end_nh1.exp()[..., None],
    )


def _places(lengths: Sequence[int], device: torch.device) -> Tensor:
    """(t,) where each token goes when every sequence has whole chunks to itself."""
    found, start = [], 0
    for length in lengths:
        found.append(torch.arange(start, start + length))
        start += -(-length // CHUNK) * CHUNK
    return torch.cat(found).to(device)


def _in_chunks(x: Tensor, place_t: Tensor, num_chunks: int) -> Tensor:
    """(t, h, ...) -> (n, h, c, ...), zeros where there is no token."""
    whole = x.new_zeros(num_chunks * CHUNK, *x.shape[1:]).index_copy(0, place_t, x)
    chunks: Tensor = whole.unflatten(0, (num_chunks, CHUNK)).transpose(1, 2)
    return chunks


# ------------------------------------------------------------------------------------------------- convolution


class ConvolutionRows(NamedTuple):
    """Which rows a causal convolution of `width` reads for each token, and which tokens of its sequence read a row.

    read, readers: (t, width), t where there is none; read[:, width - 1] is the token itself. Of responses that follow a
    shared prompt: crossing, (3, n): token, place in the width, and the row of the prompt that the token reads.
    """

    read: Tensor
    readers: Tensor
    crossing: Tensor


@lru_cache(maxsize=1 << 4)  # every layer of a micro-batch asks for the same
def convolution_rows(sequences: Sequences, width: int, device: torch.device) -> ConvolutionRows:
    ends = torch.tensor(sequences.lengths).cumsum(0).tolist()
    starts = [end - length for end, length in zip(ends, sequences.lengths, strict=True)]
    total, back = ends[-1], torch.arange(width - 1, -1, -1)

    def line(number: int, count: int) -> list[int]:
        """The last rows of a sequence and those before it, `count` in all."""
        if count == 0 or number == NO_PARENT:
            return [total] * count
        own = range(max(starts[number], ends[number] - count), ends[number])
        return [*line(sequences.parents[number], count - len(own)), *own]

    first = torch.tensor(starts).repeat_interleave(torch.tensor(sequences.lengths))
    last = torch.tensor(ends).repeat_interleave(torch.tensor(sequences.lengths))
    tokens = torch.arange(total)[:, None]
    read, readers = tokens - back, tokens + back
    read = torch.where(read < first[:, None], total, read)
    readers = torch.where(readers >= last[:, None], total, readers)
    crossing: list[tuple[int, int, int]] = []
    for number, parent in enumerate(sequences.parents):
        before = line(parent, width - 1) if parent != NO_PARENT else []
        for i in range(min(width - 1, sequences.lengths[number]) if before else 0):
            for place, row in enumerate(before[i:]):
                if row < total:
                    read[starts[number] + i, place] = row
                    crossing.append((starts[number] + i, place, row))
    found = torch.tensor(crossing, dtype=torch.int64).view(-1, 3).T.contiguous()
    return ConvolutionRows(read.to(device), readers.to(device), found.to(device))


class CausalConvolution(torch.autograd.Function):
    """y_t = silu(sum over j of w_j x_{t - width + 1 + j}) of each channel, within a sequence; x (t, d), w (d, width).

    Keeps the input alone. The gradients of rows that several tokens read are added up in one order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: ConvolutionRows) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows = rows
        y: Tensor = silu(_convolved(_with_nothing(x), weight, rows.read))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        rows: ConvolutionRows = ctx.rows
        source = _with_nothing(x)
        inner = torch.ops.aten.silu_backward(grad, _convolved(source, weight, rows.read))
        columns = [(inner * source[rows.read[:, j]]).sum(0) for j in range(weight.shape[1])]
        grad_x = _convolved(_with_nothing(inner), weight, rows.readers)
        token, place, row = rows.crossing
        if len(row):
            grad_x.index_put_((row,), inner[token] * weight.T[place], accumulate=True)
        return grad_x, torch.stack(columns, 1), None


def _with_nothing(x: Tensor) -> Tensor:
    """And a row of zeros behind."""
    return torch.cat([x, x.new_zeros(1, x.shape[1])])


def _convolved(source: Tensor, weight: Tensor, rows: Tensor) -> Tensor:
    found = source[rows[:, 0]] * weight[:, 0]
    for j in range(1, weight.shape[1]):
        found.addcmul_(source[rows[:, j]], weight[:, j])
    return found


def causal_convolution(x: Tensor, weight: Tensor, sequences: Sequences) -> Tensor:
    """See `CausalConvolution`."""
    y: Tensor = CausalConvolution.apply(x, weight, convolution_rows(sequences, weight.shape[1], x.device))
    return y
