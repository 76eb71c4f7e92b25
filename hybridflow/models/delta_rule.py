"""The gated delta rule, and the causal convolution in front of it, over packed sequences. Plain torch, for any device.

Of a head with the state S (dk, dv), at the tokens t of a sequence (Yang et al. 2024, arXiv 2412.06464, equation 10):

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T,      o_t = S_t^T q_t / sqrt(dk)

with queries and keys of length 1, log decays g <= 0 and rates beta. Within a chunk of C tokens all is products (section
3.3 there): with gamma = exp(G), Gamma_ij = gamma_i / gamma_j (i < j: 0), and T = (1 + tril(beta k k^T Gamma, -1))^-1,

    u_tilde = T (beta v),       w = T (beta gamma k),       u = u_tilde - w S,
    o = gamma q S + (q k^T Gamma) u,                        S <- gamma_C S + (exp(G_C - G) k)^T u

G_i sums g up to token i of the chunk; Gamma multiplies entries. T takes those strictly below the diagonal, o takes the
diagonal too. S is zero where a sequence begins, or what its parent has left: a prompt that several responses share.

Axes of tensors, as suffixes: t tokens, s sequences, n chunks, c tokens of a chunk, h value heads, k and v the sizes dk
and dv, w the convolution's width. The queries and keys that callers pass have key heads, each for several value heads.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

CHUNK = 64
NO_PARENT = -1
# (query, key (t, hk, dk), value (t, hv, dv), g, beta (t, hv), sequences) -> (t, hv, dv)
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


def delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, sequences: Sequences) -> Tensor:
    """(t, hk, dk) queries and keys, normalized here, (t, hv, dv) values, (t, hv) g and beta -> (t, hv, dv).

    hv is a multiple of hk: value heads in a row share a key head. Computed in float32 or wider.
    """
    return delta_rule_with_states(query, key, value, g, beta, sequences=sequences)[0]


def delta_rule_with_states(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    sequences: Sequences,
    states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same, and what each sequence leaves: (sequences, hv, dk, dv). states: that they begin with."""
    dtype, num_chunks = torch.promote_types(value.dtype, torch.float32), [-(-n // CHUNK) for n in sequences.lengths]
    shared = value.shape[1] // key.shape[1]
    q_thk, k_thk = (unit(x.to(dtype)).repeat_interleave(shared, 1) for x in (query, key))
    place_t = _places(sequences.lengths, value.device)
    tensors = (q_thk * q_thk.shape[-1] ** -0.5, k_thk, value, g, beta)
    q_nhck, k_nhck, v_nhcv, g_nhc, beta_nhc = (_in_chunks(x.to(dtype), place_t, sum(num_chunks)) for x in tensors)
    chunks = _within_chunks(q_nhck, k_nhck, v_nhcv, g_nhc.cumsum(-1), beta_nhc)
    firsts = [sum(num_chunks[:i]) for i in range(len(num_chunks))]
    o_hcv: dict[int, Tensor] = {}  # of each chunk
    zero_hkv = v_nhcv.new_zeros(value.shape[1], k_nhck.shape[-1], value.shape[-1])
    state_hkv: dict[int, Tensor] = {}  # S of each sequence, behind its chunks so far
    for level in sequences.levels:
        for i in level:
            parent = sequences.parents[i]
            state_hkv[i] = zero_hkv if parent == NO_PARENT else state_hkv[parent]
            if states is not None:
                state_hkv[i] = states[i].to(dtype)
        for step in range(max(num_chunks[i] for i in level)):
            running = [i for i in level if step < num_chunks[i]]
            chunk_s = torch.tensor([firsts[i] + step for i in running], device=value.device)
            o_shcv, next_state_shkv = chunks.step(chunk_s, torch.stack([state_hkv[i] for i in running]))
            for i, chunk, o, state in zip(running, chunk_s.tolist(), o_shcv, next_state_shkv, strict=True):
                o_hcv[chunk], state_hkv[i] = o, state
    o_thv = torch.stack([o_hcv[i] for i in range(len(o_hcv))]).transpose(1, 2).flatten(0, 1)[place_t]
    return o_thv.to(value.dtype), torch.stack([state_hkv[i] for i in range(len(num_chunks))])


def unit(x: Tensor) -> Tensor:
    """Of length 1 along the last dimension, but for an epsilon that transformers and vLLM have."""
    scaled: Tensor = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    return scaled


class _Chunks(NamedTuple):
    """What of the chunks does not depend on the state."""

    u_tilde_nhcv: Tensor  # T (beta v)
    w_nhck: Tensor  # T (beta gamma k)
    q_gamma_nhck: Tensor  # gamma q
    qk_nhcc: Tensor  # q k^T Gamma
    k_to_end_nhck: Tensor  # exp(G_C - G) k
    gamma_end_nh11: Tensor  # gamma_C

    def step(self, chunk_s: Tensor, state_shkv: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of these chunks, (s, h, c, v), and the states behind them, from the states before them."""
        u_shcv = self.u_tilde_nhcv[chunk_s] - self.w_nhck[chunk_s] @ state_shkv
        o_shcv = self.q_gamma_nhck[chunk_s] @ state_shkv + self.qk_nhcc[chunk_s] @ u_shcv
        return o_shcv, state_shkv * self.gamma_end_nh11[chunk_s] + self.k_to_end_nhck[chunk_s].mT @ u_shcv


def _within_chunks(q_nhck: Tensor, k_nhck: Tensor, v_nhcv: Tensor, g_sum_nhc: Tensor, beta_nhc: Tensor) -> _Chunks:
    """g_sum_nhc: G, summed up within the chunk."""
    later_cc = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q_nhck.device).triu(1)
    gamma_nhcc = (g_sum_nhc[..., :, None] - g_sum_nhc[..., None, :]).masked_fill(later_cc, float("-inf")).exp()
    beta_k_nhck = k_nhck * beta_nhc[..., None]
    kk_nhcc = (beta_k_nhck @ k_nhck.mT) * gamma_nhcc  # the solver reads what is strictly below the diagonal
    u_tilde_nhcv, w_nhck = (
        torch.linalg.solve_triangular(kk_nhcc, x, upper=False, unitriangular=True)
        for x in (v_nhcv * beta_nhc[..., None], beta_k_nhck * g_sum_nhc.exp()[..., None])
    )
    g_end_nh1 = g_sum_nhc[..., -1:]
    return _Chunks(
        u_tilde_nhcv,
        w_nhck,
        q_gamma_nhck=q_nhck * g_sum_nhc.exp()[..., None],
        qk_nhcc=(q_nhck @ k_nhck.mT) * gamma_nhcc,
        k_to_end_nhck=k_nhck * (g_end_nh1 - g_sum_nhc).exp()[..., None],
        gamma_end_nh11=g_end_nh1.exp()[..., None],
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

    source_tw, reader_tw: (t, width), t where there is none; source_tw[:, width - 1] is the token itself. crossing:
    (3, n), of responses that follow a shared prompt: token, place in the width, and the prompt's row that it reads.
    """

    source_tw: Tensor
    reader_tw: Tensor
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
    source_tw, reader_tw = tokens - back, tokens + back
    source_tw = torch.where(source_tw < first[:, None], total, source_tw)
    reader_tw = torch.where(reader_tw >= last[:, None], total, reader_tw)
    crossing: list[tuple[int, int, int]] = []
    for number, parent in enumerate(sequences.parents):
        before = line(parent, width - 1) if parent != NO_PARENT else []
        for i in range(min(width - 1, sequences.lengths[number]) if before else 0):
            for place, row in enumerate(before[i:]):
                if row < total:
                    source_tw[starts[number] + i, place] = row
                    crossing.append((starts[number] + i, place, row))
    found = torch.tensor(crossing, dtype=torch.int64).view(-1, 3).T.contiguous()
    return ConvolutionRows(source_tw.to(device), reader_tw.to(device), found.to(device))


class CausalConvolution(torch.autograd.Function):
    """y_t = silu(sum over j of w_j x_{t - width + 1 + j}) of each channel, within a sequence; x (t, d), w (d, width).

    Keeps the input alone. The gradients of rows that several tokens read are added up in one order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: ConvolutionRows) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows = rows
        y: Tensor = silu(_convolved(_padded(x), weight, rows.source_tw))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        rows: ConvolutionRows = ctx.rows
        x_padded = _padded(x)
        grad_conv = torch.ops.aten.silu_backward(grad, _convolved(x_padded, weight, rows.source_tw))
        grad_w_taps = [(grad_conv * x_padded[rows.source_tw[:, j]]).sum(0) for j in range(weight.shape[1])]
        grad_x = _convolved(_padded(grad_conv), weight, rows.reader_tw)
        token, place, row = rows.crossing
        if len(row):
            grad_x.index_put_((row,), grad_conv[token] * weight.T[place], accumulate=True)
        return grad_x, torch.stack(grad_w_taps, 1), None


def _padded(x: Tensor) -> Tensor:
    """And a row of zeros behind."""
    return torch.cat([x, x.new_zeros(1, x.shape[1])])


def _convolved(x_padded: Tensor, weight: Tensor, row_tw: Tensor) -> Tensor:
    found = x_padded[row_tw[:, 0]] * weight[:, 0]
    for j in range(1, weight.shape[1]):
        found.addcmul_(x_padded[row_tw[:, j]], weight[:, j])
    return found


def causal_convolution(x: Tensor, weight: Tensor, sequences: Sequences) -> Tensor:
    """See `CausalConvolution`."""
    y: Tensor = CausalConvolution.apply(x, weight, convolution_rows(sequences, weight.shape[1], x.device))
    return y
