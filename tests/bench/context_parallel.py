"""What ranks that share tokens compute and send: pairs of queries and keys by rank, and bytes beside the formula.

    python -m tests.bench.context_parallel [--tokens 4096]

Attention of a layer forward and backward, on 2 and on 4 ranks of CPUs, over one long row and many short ones of equal
tokens: 8 query heads, 2 key/value heads of 64, in bfloat16. Pairs are counted; bytes are those of what gathers and sums
are given, times the part that leaves a rank. The formula, with T tokens and c ranks: (c - 1) / c T x 2 heads x 64 x 2
bytes forward, three times as much with the backward pass, which gathers again and sums gradients. Where the layer is
computed again, what its second forward pass gathers is kept for the backward pass: that pass sends as much, too.
"""

import argparse
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

from hybridflow.models.context import Context, pieces_of

HEADS, KV_HEADS, HEAD_DIM, BYTES = 8, 2, 64, 2
MIXED = (16384, *range(100, 1100, 25))


def pairs_of(lengths: Sequence[int], context: Context) -> int:
    """Pairs of a query of this rank and a key that it attends to."""
    return sum(
        piece.length * piece.first + piece.length * (piece.length + 1) // 2 for piece in pieces_of(lengths, context)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokens", type=int, default=4096, help="of the long row; the short ones have as many together"
    )
    options = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        measure(options.tokens)
        return
    print(
        "| ranks | pairs of a rank over the mean | tokens of a rank over the mean | kept | bytes of a rank | formula |"
    )
    print("|---|---|---|---|---|---|", flush=True)
    for ranks in (2, 4):
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command = [*launch, "-m", "tests.bench.context_parallel", "--tokens", str(options.tokens)]
        subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, stderr=subprocess.DEVNULL)


def measure(tokens: int) -> None:
    import torch
    import torch.distributed as dist

    from hybridflow.cpu.attention import flash_backward, flash_forward
    from hybridflow.models import context as module
    from hybridflow.models.attention import PackedSequences
    from hybridflow.models.context import context_attention
    from hybridflow.models.shared_prompt import AttentionKernel, MergedCalls
    from hybridflow.parallel import platform as platforms

    platforms.start(seed=0, platform="cpu")
    size, rank, short = dist.get_world_size(), dist.get_rank(), tokens // 32
    lengths = (tokens, *[short] * 32)
    context = Context(size, rank, dist.group.WORLD)
    own = [piece.length for piece in pieces_of(lengths, context)]
    missing = module.most_tokens(lengths, context) - sum(own)
    packed = PackedSequences.from_lengths((*own, *([missing] if missing else [])), torch.device("cpu"))
    spans = module.ContextSpans.of(lengths, [], context, sum(packed.lengths), torch.device("cpu"))
    shapes = [(sum(packed.lengths), heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    query, key, value = (torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    sent = Counter[str]()

    def counted(call: Any, whole: int) -> Any:
        def counting(*tensors: Any, **options: Any) -> Any:
            sent["elements"] += tensors[whole].numel() * (size - 1) // size
            return call(*tensors, **options)

        return counting

    calls = MergedCalls(packed.own, spans.reads, HEAD_DIM**-0.5, AttentionKernel(flash_forward, flash_backward))
    found = []
    for keep in (False, True):
        sent.clear()
        with (
            mock.patch.object(dist, "all_gather_into_tensor", counted(dist.all_gather_into_tensor, 0)),
            mock.patch.object(dist, "reduce_scatter_tensor", counted(dist.reduce_scatter_tensor, 1)),
        ):
            out = context_attention(query, key, value, calls, context=context, keep=keep)
            out.float().square().sum().backward()
        found.append(sent["elements"] * BYTES)
    everyone = [Context(size, each, None) for each in range(size)]
    pairs = [pairs_of(lengths, each) for each in everyone]
    counts = [sum(piece.length for piece in pieces_of(lengths, each)) for each in everyone]
    if rank == 0:
        cells = [size, f"{max(pairs) * size / sum(pairs):.4f}", f"{max(counts) * size / sum(counts):.4f}"]
        once = (size - 1) / size * sum(lengths) * 2 * KV_HEADS * HEAD_DIM * BYTES
        for kept, times, counted_bytes in zip(("no", "yes"), (3, 2), found, strict=True):
            row = [*cells, kept, f"{counted_bytes:,}", f"{times * once:,.0f}"]
            print("|", " | ".join(map(str, row)), "|", flush=True)
    platforms.stop()


if __name__ == "__main__":
    main()
