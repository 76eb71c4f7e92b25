"""What the trainer does, and knows, while a flow runs an iteration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.recording.traces import Trace, untraced


def _silent(text: str) -> None:
    pass


@dataclass
class RunHooks:
    """All but `say` and `show` are collective over the world.

    say: a line for the person who watches. show: what is going on now. should_stop: whether all ranks are to end here.
    save_rollout: the responses of an iteration, for a later start. load_rollout: what an earlier start has kept.
    decode: token ids as text. heldout: takes (iteration, name of the set, prompts, responses,
    marks) of an evaluation. trace: around a stage of an iteration.
    """

    say: Callable[[str], None] = _silent
    show: Callable[[str], None] = _silent
    should_stop: Callable[[], bool] = lambda: False
    save_rollout: Callable[[int, Mapping[str, Tensor]], None] = lambda iteration, tensors: None
    load_rollout: Callable[[PromptBatch, int], RolloutBatch | None] = lambda prompts, iteration: None
    decode: Callable[[list[int]], str] = lambda ids: ""
    heldout: Callable[[int, str, PromptBatch, RolloutBatch, Tensor], None] = lambda *evaluation: None
    trace: Trace = untraced
