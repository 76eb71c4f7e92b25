"""What ranks that share tokens have of them, and what their attention reads. For values: `distributed.test_parity`."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hybridflow.cpu.attention import flash_backward, flash_forward
from hybridflow.models.attention import PackedSequences, attention_by_length
from hybridflow.models.context import (
    Context,
    ContextSpans,
    SharedOutputs,
    attention_to_whole,
    context_attention,
    most_tokens,
    pieces_of,
    places,
)
from hybridflow.models.delta_rule import NO_PARENT, Sequences
from hybridflow.models.micro_batch import padding
from hybridflow.models.shared_prompt import AttentionKernel, MergedCalls
from hybridflow.models.window_attention import in_reach
from hybridflow.roles import base
from hybridflow.roles.base import Role
from tests.bench.context_parallel import MIXED, pairs_of
from tests.worlds import world_of_one

CPU = torch.device("cpu")
LENGTHS = [
    ([16], []),
    ([1, 2, 3, 5, 4096, 7], []),
    ([9, 30, 4, 5, 8, 1, 12, 2], [(1, [3, 4, 5]), (2, [6, 7])]),  # a row alone, two prompts, what follows them
]
each_case = pytest.mark.parametrize(("lengths", "prompts"), LENGTHS, ids=["one", "mixed", "prompts"])
each_size = pytest.mark.parametrize("size", [2, 3, 4])


def contexts(size: int) -> list[Context]:
    return [Context(size, rank, None) for rank in range(size)]


@each_size
@each_case
def test_every_token_is_of_one_rank(lengths: list[int], prompts: list, size: int) -> None:
    own = [places(pieces_of(lengths, each), lengths) for each in contexts(size)]
    assert torch.cat(own).sort().values.tolist() == list(range(sum(lengths)))
    assert all(torch.equal(each, each.sort().values) for each in own), "in the order of the stretches"
    assert most_tokens(lengths, contexts(size)[0]) == max(map(len, own))


def test_a_rank_has_a_piece_of_the_front_and_its_mirror_image() -> None:
    own = [places(pieces_of([16, 8], each), [16, 8]).tolist() for each in contexts(2)]
    assert own == [[0, 1, 2, 3, 12, 13, 14, 15, 16, 17, 22, 23], [*range(4, 12), *range(18, 22)]]


@each_size
@each_case
def test_a_query_reads_the_keys_before_it_and_its_prompt_once(lengths: list[int], prompts: list, size: int) -> None:
    """By the places of gathered tokens. With the own piece, read causally, each query reads all that it may."""
    num_tokens = most_tokens(lengths, contexts(size)[0]) + 3  # with padding
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    followed = {follower: prompt for prompt, followers in prompts for follower in followers}
    own = [places(pieces_of(lengths, each), lengths) for each in contexts(size)]
    token_at = {rank * num_tokens + i: int(x) for rank, each in enumerate(own) for i, x in enumerate(each)}
    for context in contexts(size):
        read: dict[int, list[int]] = {int(token): [] for token in own[context.rank]}
        at = 0
        for piece in pieces_of(lengths, context):
            tokens = own[context.rank][at : at + piece.length].tolist()
            for number, token in enumerate(tokens):
                read[token] += tokens[: number + 1]
            at += piece.length
        spans = ContextSpans.of(lengths, prompts, context, num_tokens, CPU)
        for reads in spans.reads:
            assert len(reads.queries.unique()) == len(reads.queries) and len(reads.keys.unique()) == len(reads.keys)
            assert not reads.spans.causal and min(*reads.spans.queries, *reads.spans.keys) > 0
            parts = zip(reads.queries.split(reads.spans.queries), reads.keys.split(reads.spans.keys), strict=True)
            for queries, keys in parts:
                for query in queries.tolist():
                    read[int(own[context.rank][query])] += [token_at[key] for key in keys.tolist()]
        for token, keys in read.items():
            stretch = next(i for i in range(len(lengths)) if starts[i] <= token < starts[i + 1])
            expected = list(range(starts[stretch], token + 1))
            if stretch in followed:
                prompt = followed[stretch]
                expected += range(starts[prompt], starts[prompt + 1])
            assert sorted(keys) == sorted(expected), (context.rank, token)


@each_size
def test_ranks_have_nearly_equal_work(size: int) -> None:
    """Also where a long row lies beside many short ones."""
    pairs = [pairs_of(MIXED, each) for each in contexts(size)]
    assert sum(pairs) == sum(length * (length + 1) // 2 for length in MIXED)
    assert max(pairs) * size / sum(pairs) < 1.05


@each_size
def test_outputs_of_all_ranks(size: int) -> None:
    """Each output is of one rank, and `own` takes this rank's of what belongs to all."""
    lengths, rows = [9, 6, 11], torch.tensor([2, 3, 4, 8, 11, 14, 16, 25])
    shared = [SharedOutputs.of(rows, 100 + rows, lengths, each) for each in contexts(size)]
    assert all(torch.equal(each.where, shared[0].where) for each in shared)
    assert shared[0].where.sort().values.tolist() == (100 + rows).tolist()
    for each in shared:
        own = places(pieces_of(lengths, each.context), lengths)
        assert set((each.own(each.where) - 100).tolist()) == set(own.tolist()) & set(rows.tolist())


@pytest.mark.parametrize("keep", [False, True])
def test_keys_travel_while_the_own_pieces_attend_and_again_backward_unless_kept(keep: bool) -> None:
    """One rank that shares with nobody has both pieces of each stretch: the values are those of the whole."""
    lengths, calls = (9, 4), list[str]()

    def noted(call: Any, name: str) -> Any:
        def noting(*args: Any, **named: Any) -> Any:
            calls.append(name)
            return call(*args, **named)

        return noting

    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(13, heads, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2)]
    whole = attention_by_length(*inputs, packed=PackedSequences.from_lengths(lengths, CPU), scale=0.3)
    expected = torch.autograd.grad(whole.square().sum(), inputs)
    kernel = AttentionKernel(noted(flash_forward, "attend"), noted(flash_backward, "attend backward"))
    with world_of_one() as world, mock.patch.object(dist.Work, "wait", noted(dist.Work.wait, "wait")):
        context = Context(1, 0, world)
        own = PackedSequences.from_lengths(tuple(piece.length for piece in pieces_of(lengths, context)), CPU).own
        spans = ContextSpans.of(lengths, [], context, 13, CPU)
        with (
            mock.patch.object(dist, "all_gather_into_tensor", noted(dist.all_gather_into_tensor, "gather")),
            mock.patch.object(dist, "reduce_scatter_tensor", noted(dist.reduce_scatter_tensor, "sum")),
        ):
            calls_of = MergedCalls(own, spans.reads, 0.3, kernel)
            out = context_attention(*inputs, calls_of, context=context, keep=keep)
            assert calls[:3] == ["gather", "attend", "wait"]
            calls.clear()
            found = torch.autograd.grad(out.square().sum(), inputs)
            backward = ["attend backward"] if keep else ["gather", "attend backward", "wait"]
            assert calls[: len(backward)] == backward and calls.count("gather") == (not keep) and "sum" in calls
        of_whole = attention_to_whole(*inputs, calls_of, here=spans.here)
        of_whole_gradients = torch.autograd.grad(of_whole.square().sum(), inputs)
    for ours, gradients in ((out, found), (of_whole, of_whole_gradients)):
        assert torch.allclose(ours, whole, rtol=0, atol=1e-6)
        for mine, theirs in zip(gradients, expected, strict=True):
            assert torch.allclose(mine, theirs, rtol=0, atol=1e-5)


@each_size
@each_case
@pytest.mark.parametrize("window", [1, 2, 5, 64])
def test_before_each_piece_stands_what_a_window_reaches(
    lengths: list[int], prompts: list, size: int, window: int
) -> None:
    """Also where pieces are shorter than the window, and where a prompt stands in front."""
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    parents = {follower: prompt for prompt, followers in prompts for follower in followers}
    stretches = Sequences(tuple(lengths), tuple(parents.get(i, NO_PARENT) for i in range(len(lengths))))

    def tokens_of(stretch: int) -> list[int]:
        return list(range(starts[stretch], starts[stretch + 1]))

    own = [
        [tokens_of(piece.stretch)[piece.first :][: piece.length] for piece in pieces_of(lengths, each)]
        for each in contexts(size)
    ]
    for rank, pieces in enumerate(own):
        reach = in_reach(stretches, size, rank, window)
        sent = [[x[len(x) - n :] for x, n in zip(*both, strict=True)] for both in zip(own, reach.sent, strict=True)]
        assert all(n <= window - 1 for of_rank in reach.sent for n in of_rank)
        for piece, tokens, ends in zip(pieces_of(lengths, contexts(size)[rank]), pieces, reach.before, strict=True):
            before = [token for end in ends for token in sent[end.rank][end.number][-end.count :]]
            line = tokens_of(parents[piece.stretch]) if piece.stretch in parents else []
            line = [*line, *tokens_of(piece.stretch)]
            place = line.index(tokens[0])
            assert before == line[max(0, place - window + 1) : place]


def test_ranks_that_share_tokens_train_in_as_many_passes() -> None:
    """Gradients are summed up during the last: with others before it, ranks would wait for each other crosswise."""
    found = {trains: [passes_of(rank, trains=trains) for rank in (0, 1)] for trains in (True, False)}
    assert [len(passes) for passes in found[False]] == [4, 2], "nothing is summed up"
    assert [len(passes) for passes in found[True]] == [4, 4]
    assert all(passes[0] == ("shared", 0) for passes in found[True]), "first what all share"
    assert [each.repeats for each in found[True][1][2:]] == [(0,), (0,)], "nobody wants these outputs"


def passes_of(rank: int, *, trains: bool) -> list[Any]:
    """Of one of two ranks, as a role makes them of a row that both share and of 3 and 1 rows that are not cut."""
    role: Any = object.__new__(Role)
    role._context, role._padded = Context(2, rank, None), padding(1)
    role._platform, role._config = SimpleNamespace(device=CPU), SimpleNamespace(micro_batch_tokens=40)
    layout = SimpleNamespace(dense_per_expert_copy=1, vpp=1)
    both = object()
    role.grid = SimpleNamespace(in_step=lambda trains: [both] if trains else [], layout=layout)
    whole = ([1, 2, 3], [4])[rank]

    def all_reduce(own: torch.Tensor, operation: Any, group: Any) -> None:
        assert (operation, group) == (dist.ReduceOp.MAX, both)
        own.fill_(4)

    def make(batch: Any, rows: list[int], **named: Any) -> list[Any]:
        return [("shared" if "context" in named else "whole", row) for row in rows]

    with (
        mock.patch.object(dist, "all_reduce", all_reduce),
        mock.patch.object(base, "rows_of_rank", lambda *others, **named: (whole, [0])),
    ):
        found: list[Any] = role._micro_batches(None, [[0, 1, 2, 3, 4]], make, one=trains)
    return found
