"""Which of vLLM 0.32.0's two model runners an engine gets. vLLM would choose by itself; here hybridflow does.

The older one (V1) runs everywhere. The newer one (V2) needs Triton, knows no pipeline of stages that torchrun has
started, and holds at most so many ids of a request in tables: with more it fails at the first request, when
everything is loaded. It schedules the next step while the GPU computes one, and draws other tokens from a seed than V1.
"""

import functools
import os

from hybridflow.config import SamplingConfig

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
# what V2's tables hold of a request (v1/worker/gpu/sample/logit_bias.py); end tokens of the model are stops as well
MOST_ALLOWED_TOKEN_IDS, MOST_LOGIT_BIASES, MOST_STOPS = 1024, 1024, 128
ROOM_FOR_ENDS = 32


def choose_runner(sampling: SamplingConfig, *, cuda: bool, triton: bool, pp: int, cuts_routes: bool = False) -> bool:
    """Set the variable that vLLM reads when it builds an engine. Whether that is V2.

    Where V2 would do, a 0 that a user had set before the first engine makes it V1.
    """
    wish = _wish()  # before it is overwritten
    able = triton and second_runner(sampling, cuda=cuda, pp=pp, cuts_routes=cuts_routes)
    second = able and wish != "0"
    os.environ[VARIABLE] = "1" if second else "0"
    return second


def second_runner(sampling: SamplingConfig, *, cuda: bool, pp: int, cuts_routes: bool = False) -> bool:
    """Whether V2 can do what is asked; the tables hold what each request says.

    cuts_routes: the experts of requests that are aborted count, and V2 returns none of these.
    """
    return (
        cuda
        and pp == 1
        and not cuts_routes
        and len(sampling.allowed_token_ids or ()) <= MOST_ALLOWED_TOKEN_IDS
        and len(sampling.logit_bias or ()) <= MOST_LOGIT_BIASES
        and len(sampling.stop_token_ids) <= MOST_STOPS - ROOM_FOR_ENDS
    )


@functools.cache
def _wish() -> str | None:
    """What the user had set: asked once, for later it is our own word."""
    return os.environ.get(VARIABLE)
