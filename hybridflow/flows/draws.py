"""The next prompts of a run in order, by how many the run has drawn before."""

from collections.abc import Sequence

from hybridflow.batch import PromptBatch
from hybridflow.config import ExperimentConfig
from hybridflow.data.prompts import PromptDataset
from hybridflow.flows.generation import PromptDraw


class PromptDraws:
    """From data.train. Collective over the world where an environment begins rows."""

    def __init__(self, config: ExperimentConfig, prompts: PromptDataset) -> None:
        self._config, self._prompts = config, prompts

    def draw(self, position: int, count: int | None = None) -> PromptDraw:
        """The next prompts after the first `position` of the run. count: None: data.prompts_per_iteration prompts."""
        data = self._config.data
        order = self._prompts.order(self._config.seed, data.shuffle, position=position)
        first, count = order.position, data.prompts_per_iteration if count is None else count
        drawn = self._prompts.draw(order, count)
        self._prompts.start_ahead(order, count)
        return PromptDraw(drawn.batch, drawn.numbers, first, order.position, drawn.dropped)

    def at(self, numbers: Sequence[int]) -> PromptBatch:
        """By their numbers in the data set."""
        return self._prompts.batch(list(numbers))
