"""What an iteration works on."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.checkpoint.state import RunState
from hybridflow.data.examples import Example
from hybridflow.flows.deferred_log_probs import DeferredLogProbs
from hybridflow.recording.iteration import Metrics


class IterationData:
    """Prompts and responses, or rows of files; the state of the run; the metrics of the iteration so far.

    prompt_rows: the prompts' numbers in the data set. score_parts: parts of the score by name, (N,), of `rollout`.
    """

    prompts: PromptBatch
    prompt_rows: tuple[int, ...]
    rollout: RolloutBatch

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.forget()

    def forget(self) -> None:
        """Another iteration begins."""
        self.examples: Sequence[Example] = ()
        self.metrics: Metrics = {}
        self.score_parts: Mapping[str, Tensor] = {}
        self.deferred: DeferredLogProbs | None = None

    @property
    def iteration(self) -> int:
        """Counted from 1."""
        return self.state.iteration
