"""Tables of the comparison: medians over rounds, their spread, shares of the matrix-product rate, ratios."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from tests.bench.peer_programs.workload import PHASES, Measured, Seconds, Size, Workload

CONSOLE = Console(width=130, highlight=False, markup=False)


@dataclass(frozen=True)
class Case:
    name: str
    workload: Workload
    size_name: str
    size: Size
    dtype: str

    def __str__(self) -> str:
        return f"{self.name}, {self.size_name}, {self.dtype}"


@dataclass(frozen=True)
class Work:
    """Floating-point operations of matrix products and attention that an iteration's phases need, without padding.

    Of tokens, of which some are of responses: 2 a parameter and token forward, twice that backward; the output layer at
    response tokens alone. Attention is taken at the mean length. A prompt counts with each of its responses, also where
    a program runs it once.
    """

    size: Size
    tokens: int
    response_tokens: int
    sequences: int

    @property
    def body(self) -> float:
        """A forward pass through the layers."""
        s = self.size
        projections = s.hidden * s.head_dim * (2 * s.heads + 2 * s.kv_heads) + 3 * s.hidden * s.ffn
        attention = 4 * s.heads * s.head_dim * self.tokens / self.sequences / 2
        return self.tokens * s.layers * (2 * projections + attention)

    @property
    def head(self) -> float:
        return 2.0 * self.response_tokens * self.size.vocab * self.size.hidden

    def of_phases(self, algorithm: str) -> Seconds:
        """Operations by phase: scoring is by actor, reference and, for PPO, critic and reward model."""
        lm, value = self.body + self.head, self.body if algorithm == "ppo" else 0.0
        parts = {"rollout": lm, "score": 2 * lm + 2 * value, "update": 3 * (lm + value)}
        return parts | {"total": sum(parts.values())}


def medians(rounds: Sequence[Measured]) -> list[Seconds]:
    """Of each round, over its iterations."""
    return [{phase: statistics.median(row[phase] for row in each.seconds) for phase in PHASES} for each in rounds]


def print_case(case: Case, rounds: dict[str, list[Measured]], *, prompt_tokens: int, rates: Sequence[float]) -> None:
    """rounds: by program, ours first. rates: FLOP/s, of each round."""
    rate = statistics.median(rates)
    table = Table(
        title=f"{case}: seconds of an iteration, median [least..most] of {len(rates)} rounds;\n"
        f"share of the product rate: {rate / 1e12:.3f} [{min(rates) / 1e12:.3f}..{max(rates) / 1e12:.3f}] TFLOP/s"
    )
    table.add_column("program")
    for name in (*PHASES, "response tokens", "tokens/s"):
        table.add_column(name, justify="right")
    for program, measured in rounds.items():
        tokens = round(statistics.median(n for each in measured for n in each.response_tokens))
        work = Work(case.size, prompt_tokens + tokens, tokens, case.workload.sequences)
        needed, seconds = work.of_phases(case.workload.algorithm), medians(measured)
        cells = []
        for phase in PHASES:
            values = [row[phase] for row in seconds]
            share = needed[phase] / statistics.median(values) / rate
            cells.append(f"{statistics.median(values):.2f}\n[{min(values):.2f}..{max(values):.2f}]\n{share:.1%}")
        total = statistics.median(row["total"] for row in seconds)
        table.add_row(program, *cells, str(tokens), f"{work.tokens / total:.0f}")
    CONSOLE.print(table)
    print_ratios(rounds)


def print_ratios(rounds: dict[str, list[Measured]]) -> None:
    """Ours over each peer: of the medians, and the least and most of what the rounds give each for itself."""
    (_, ours), *peers = ((program, medians(measured)) for program, measured in rounds.items())
    for peer, theirs in peers:
        parts = []
        for phase in PHASES:
            ratio = statistics.median(r[phase] for r in ours) / statistics.median(r[phase] for r in theirs)
            each = [mine[phase] / other[phase] for mine, other in zip(ours, theirs, strict=True)]
            parts.append(f"{phase} {ratio:.2f} [{min(each):.2f}..{max(each):.2f}]")
        CONSOLE.print(f"ours / {peer}: {', '.join(parts)}")
