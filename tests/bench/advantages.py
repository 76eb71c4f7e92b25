"""Seconds of GAE over a large batch, in as many passes as its longest response takes and as all of its tokens would.

    python -m tests.bench.advantages [--tokens 10000000] [--longest 4096] [--rounds 5]

A long response every eighth, the others of 32 to 1,024 tokens. Both ways by turns in one run; the results are equal.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor

from hybridflow.algorithms import advantages
from hybridflow.algorithms.advantages import gae


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(1)
    several = torch.randint(32, 1025, (options.tokens // 32,), generator=generator)
    several[::8] = options.longest
    lengths = several[: int((several.cumsum(0) <= options.tokens).sum())]
    rewards, values = torch.randn(2, int(lengths.sum()), generator=generator)
    mask = torch.ones(len(rewards), dtype=torch.bool)

    def once() -> Tensor:
        return gae(rewards, values, mask, lengths=lengths, gamma=0.99, gae_lambda=0.95)[0]

    seconds: dict[str, list[float]] = {"longest": [], "all": []}
    scan, expected = advantages._discounted_suffix_sums, once()
    ways = {"longest": scan, "all": lambda x, *rest, **named: scan(x, *rest, **named | {"longest": len(x)})}
    for _ in range(options.rounds):
        for name, way in ways.items():
            advantages._discounted_suffix_sums = way
            began = time.perf_counter()
            found = once()
            seconds[name].append(time.perf_counter() - began)
            assert torch.equal(found, expected), "further passes change nothing"
    one, other = map(statistics.median, seconds.values())
    print(f"{len(rewards):,} tokens, {len(lengths):,} responses, the longest of {int(lengths.max()):,} tokens")
    print(f"passes for the longest: {one:.2f} s; for all tokens: {other:.2f} s; ratio {one / other:.2f}")


if __name__ == "__main__":
    main()
