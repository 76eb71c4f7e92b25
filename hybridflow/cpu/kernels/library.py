"""The compiled kernels: made by the C compiler of this machine, in a second, and kept for the next process.

Where there is none, or no AVX2, or HYBRIDFLOW_NATIVE is 0, torch's operations do the same work, slower. Results then
differ by the order of sums, so the ranks of a run agree: they all have the kernels, or all do without
(`parallel/platform.py`).
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from hybridflow.errors import EnvironmentProblem

HERE = Path(__file__).parent
SOURCES = (
    "attention.c",
    "decoder.c",
    "layers.c",
    "linear.c",
    "matrix.c",
    "moves.c",
    "paged.c",
    "sampling.c",
    "vocabulary.c",
)
# no -ffast-math: the start-up code has the whole process flush small numbers to zero
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-ffp-contract=fast", "-shared", "-fPIC")
COMPILERS = ("cc", "gcc", "clang")
VARIABLE = "HYBRIDFLOW_NATIVE"
SECONDS = 120.0  # that compiling may take

_given_up: list[str] = []  # why this process does without kernels that it could have


def library() -> ctypes.CDLL | None:
    """The kernels, or None. The first call of a process may compile them."""
    return None if _given_up else _found()[0]


def why_not() -> str | None:
    """Why there are none; None where there are."""
    return _given_up[0] if _given_up else _found()[1]


def do_without(reason: str) -> None:
    """From now on this process has none."""
    _given_up.append(reason)


@functools.cache
def _found() -> tuple[ctypes.CDLL | None, str | None]:
    wish = os.environ.get(VARIABLE, "1")
    if wish not in ("0", "1"):
        raise EnvironmentProblem(f"{VARIABLE} is {wish!r}: 0 does without the kernels in C, 1 takes them where it can")
    if wish == "0":
        return None, f"{VARIABLE} is 0"
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return None, f"this CPU has no AVX2 ({torch.backends.cpu.get_cpu_capability()})"
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return None, f"there is no C compiler ({', '.join(COMPILERS)})"
    try:
        with _cache() as directory:
            return ctypes.CDLL(str(compiled(compiler, directory))), None
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        return None, f"{compiler}: {next((line for line in said if 'error' in line), said[0] if said else error)}"


def compiled(compiler: str, directory: Path, flags: Sequence[str] = ()) -> Path:
    """The file of the kernels as `compiler` makes them for this CPU, in `directory`: an old one, or a new one.

    Errors: OSError, subprocess.SubprocessError.
    """
    target = directory / f"{_digest(compiler, flags)}.so"
    with _lock(directory):
        if not target.exists():
            handle, part = tempfile.mkstemp(dir=directory, suffix=".part")
            os.close(handle)
            try:
                command = [compiler, *FLAGS, *flags, *(str(HERE / name) for name in SOURCES), "-o", part, "-lm"]
                subprocess.run(command, check=True, capture_output=True, errors="replace", timeout=SECONDS)
                Path(part).chmod(0o755)
                Path(part).replace(target)
            finally:
                Path(part).unlink(missing_ok=True)
    return target


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """The ranks of a host come at once, and one compiles for all."""
    with (directory / "lock").open("w", encoding="utf-8") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: each compiles
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _cache() -> Iterator[Path]:
    """A cache that stays. Without a writable home a temporary one: a loaded library needs no file any more."""
    with contextlib.ExitStack() as stack:
        try:
            directory = Path.home() / ".cache" / "hybridflow"
            directory.mkdir(parents=True, exist_ok=True)
            (directory / "lock").touch()
        except (OSError, RuntimeError):  # RuntimeError: there is no home
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hybridflow-kernels-")))
        yield directory


def _digest(compiler: str, flags: Sequence[str]) -> str:
    """Of all that decides the machine code: sources, compiler, flags, and what the CPU can do."""
    version = subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, errors="replace", timeout=SECONDS
    )
    cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    features = sorted({line for line in cpu if line.startswith(("flags", "vendor_id", "cpu family", "model"))})
    sources = (path.read_text(encoding="utf-8") for path in sorted(HERE.glob("*.[ch]")))
    parts = [*sources, version.stdout, *FLAGS, *flags, *features]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


DTYPES = (torch.float32, torch.bfloat16)


def fields(pointers: list[str], numbers: list[str], *scalars: str) -> list[tuple[str, type]]:
    """Of a struct as the C files have them: pointers, 64-bit integers, then floats."""
    return [
        *((name, ctypes.c_void_p) for name in pointers),
        *((name, ctypes.c_int64) for name in numbers),
        *((name, ctypes.c_float) for name in scalars),
    ]


def run(kernel: Callable[..., int], arguments: ctypes.Structure, pieces: int) -> None:
    """Call the kernel by as many threads as torch has, at most one for each piece of the work."""
    taken = ctypes.c_int64(0)  # the next piece, which the threads count on
    arguments.next = ctypes.addressof(taken)
    call = functools.partial(kernel, ctypes.byref(arguments))
    count = min(torch.get_num_threads(), pieces)
    others = [_threads(os.getpid(), count - 1).submit(call) for _ in range(count - 1)] if count > 1 else []
    if any([call(), *(other.result() for other in others)]):
        raise MemoryError("a kernel on the CPU found no memory to compute in")


@functools.lru_cache(maxsize=1)
def _threads(process: int, count: int) -> ThreadPoolExecutor:
    """process: a fork has none of the parent's threads."""
    return ThreadPoolExecutor(count, "kernels")
