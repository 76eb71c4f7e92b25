"""A process that has imported what the ranks of a test need, and becomes each of them by a fork.

python -m tests.rank_server [bare]

Every line of its input is a request, every line of its output the answer:
    {"environment": ..., "module": ..., "arguments": [...], "out": FILE, "error": FILE}    the pid of the new rank
    {}                                                       {pid: exit status} of the ranks that have ended since

With `bare` it has imported nothing.

A rank ends without Python's clearing of all modules, of which a fork has thousands more than the module that it runs
needs: that took longer than most ranks compute. Ranks that torchrun has started end in full.
"""

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import random
import runpy
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "glm", "opt", "mixtral", "qwen3_moe")
ENGINE_MODELS = (*(name for name in FAMILIES if name != "glm"), "transformers")  # GLM-4 runs by transformers' class
MODULES = (
    "hybridflow.trainers.online",
    "vllm",  # whatever an engine loads when it is built
    "vllm.entrypoints.llm",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    *(f"vllm.model_executor.models.{name}" for name in ENGINE_MODELS),
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.optimizer.distrib_optimizer",
    *(f"transformers.models.{name}.modeling_{name}" for name in FAMILIES),
)


def main() -> None:
    end = End()
    atexit.register(end)  # the first one is called last: when all threads have ended, and after what others registered
    if sys.argv[1:] != ["bare"]:
        prepare()
    rank = serve()
    if rank is not None:
        with end:
            become(rank)


class End:
    """The end of this process, with the status that what runs within the block leaves it with."""

    def __init__(self) -> None:
        self._status = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, SystemExit):
            code = 0 if error.code is None else error.code
            self._status = code & 0xFF if isinstance(code, int) else 1
        elif kind is not None:
            self._status = 1

    def __call__(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        ctypes.CDLL(None).fflush(None)
        os._exit(self._status)


def prepare() -> None:
    from hybridflow.cpu.kernels.library import library
    from hybridflow.parallel.platform import prepare_imports

    prepare_imports("auto")
    for name in MODULES:
        importlib.import_module(name)
    register_kernels()
    configure_logging()
    library()  # asks the compiler for its version
    gc.collect()
    gc.freeze()  # what is there would be searched for garbage by every rank, and its memory be copied
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a fork has one thread, this process {len(threads)}: locks of the others stay locked"


def register_kernels() -> None:
    """What vLLM does in every process that builds an engine, and again for each; it looks through all modules."""
    from vllm.platforms import current_platform

    once = functools.cache(current_platform.register_triton_kernel_overrides)
    once()
    type(current_platform).register_triton_kernel_overrides = staticmethod(once)


def configure_logging() -> None:
    """What the first engine of a process does, with the level that ours set; another level is set anew."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging

    configure_logging(LoggingConfig(log_level="ERROR"))


def serve() -> dict[str, Any] | None:
    """What to be, in a rank; None when nobody asks any more."""
    for line in sys.stdin:
        request = json.loads(line)
        if request:
            pid = os.fork()
            if pid == 0:
                return request
            answer: Any = pid
        else:
            answer = ended()
        print(json.dumps(answer), flush=True)
    return None


def ended() -> dict[int, int]:
    found = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found[pid] = os.waitstatus_to_exitcode(status)


def become(rank: dict[str, Any]) -> None:
    """Run the module as `python -m` would. A rank ends with the server, that with the tests."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(rank["environment"])
    for descriptor, name, flags in ((0, os.devnull, 0), (1, rank["out"], os.O_APPEND), (2, rank["error"], os.O_APPEND)):
        file = os.open(name, (os.O_WRONLY | os.O_CREAT | flags) if descriptor else os.O_RDONLY)
        os.dup2(file, descriptor)
        os.close(file)
    random.seed()  # two processes differ in it
    gc.unfreeze = _leave_frozen
    sys.argv = [rank["module"], *rank["arguments"]]
    if "coverage" in sys.modules:  # of `python -m tests.mutants map`
        importlib.import_module("tests.mutants.contexts").note_context()
    runpy.run_module(rank["module"], run_name="__main__", alter_sys=True)


def _leave_frozen() -> None:
    """Every vLLM engine that is closed would have all that was imported searched for garbage from then on."""


if __name__ == "__main__":
    main()
