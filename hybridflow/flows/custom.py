"""A user's own flow: `algorithm: {name: custom, flow: "package.module:function", roles: [actor, reward]}`."""

import traceback
from collections.abc import Callable

from hybridflow.batch import RolloutBatch
from hybridflow.config.algorithms import Custom
from hybridflow.errors import FlowError, Stopped, UserError
from hybridflow.flows.run import Run
from hybridflow.flows.step_metrics import NonFinite
from hybridflow.user_code import load_function


def custom_flow(c: Custom) -> Callable[[Run], RolloutBatch]:
    """The flow that `c.flow` names. Errors: those of `load_function`."""
    function = load_function(c.flow, "algorithm.flow")

    def flow(run: Run) -> RolloutBatch:
        try:
            batch = function(run, c)
        except (UserError, NonFinite, Stopped):
            raise
        except Exception as error:  # the boundary to a user's code
            raise FlowError(f"flow {c.flow}: {_where(error)}: {type(error).__name__}: {error}") from error
        if not isinstance(batch, RolloutBatch):
            raise FlowError(f"flow {c.flow}: returned {type(batch).__name__}; expected the RolloutBatch it trained on")
        return batch

    return flow


def _where(error: Exception) -> str:
    """The innermost line of the user's file that the error went through."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without our own call
    own = [frame for frame in frames if frame.filename == frames[0].filename] if frames else []
    return f"in {own[-1].name}, {own[-1].filename}, line {own[-1].lineno}" if own else "where it was called"
