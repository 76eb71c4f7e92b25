"""Rows that a model runs, by their means, and the micro-batches that a budget of tokens makes of them. Pure."""

from dataclasses import dataclass
from math import ceil

from hybridflow.models.prompt_groups import SAVED_TO_PAY


@dataclass(frozen=True)
class MeanRows:
    """Sequences that a replica runs in one go, by their means.

    samples: rows that share a prompt. whole: outputs are one a sequence, so that the last token is run, too.
    """

    number: float
    prompt: float  # tokens
    response: float
    samples: int = 1
    whole: bool = False

    @property
    def shared(self) -> float:
        """Tokens of a prompt that are run once for all rows, as `models.prompt_groups` has it; 0: none."""
        saved = (self.samples - 1) * (self.prompt - 1)
        return self.prompt - 1 if saved and saved >= SAVED_TO_PAY * self.samples * self.length else 0.0

    @property
    def length(self) -> float:
        """Tokens of a row that would be run by itself."""
        return self.prompt + self.response - (0 if self.whole else 1)

    @property
    def tokens(self) -> float:
        """That are run."""
        return self.number * (self.length - self.shared * (1 - 1 / self.samples))

    @property
    def outputs(self) -> float:
        return self.number if self.whole else self.number * self.response

    @property
    def pairs(self) -> float:
        """Queries times keys that causal attention looks at."""
        prompts = self.shared * self.shared / 2 * self.number / self.samples
        rest = self.length - self.shared
        return prompts + self.number * (rest * rest / 2 + rest * self.shared)

    def split(self, replicas: int) -> "MeanRows":
        """The largest share."""
        return MeanRows(ceil(self.number / replicas), self.prompt, self.response, self.samples, self.whole)

    def micro_batches(self, budget: int) -> int:
        """Into which a budget of tokens cuts them: as many whole rows, or groups, in each as go in."""
        if not self.number:
            return 0
        of_group = self.tokens / self.number * self.samples if self.shared else self.length
        groups = self.number / self.samples if self.shared else self.number
        if of_group > budget:  # groups that are cut
            return ceil(self.tokens / budget)
        return ceil(groups / max(1, int(budget / of_group)))


@dataclass(frozen=True)
class Pass:
    """A micro-batch on a rank: what the products see."""

    tokens: float
    outputs: float
    pairs: float


def passes(rows: MeanRows, budget: int) -> tuple[int, Pass]:
    """How many micro-batches, and the mean one."""
    count = rows.micro_batches(budget)
    return count, Pass(rows.tokens / max(count, 1), rows.outputs / max(count, 1), rows.pairs / max(count, 1))
