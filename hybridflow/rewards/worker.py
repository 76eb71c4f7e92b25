"""The process in which reward functions run: forked by `supervisor`, it calls what that asks for, until it is killed.

A message is a unit: the rows of one call. The answer is the scores and the seconds, or the error, as JSON. A function
sees the same whichever process calls it: random numbers begin with the texts of the unit, and hashes of text are those
of PYTHONHASHSEED=0. What it prints goes to a pipe of the supervisor's; what it leaves of alarms, of another working
directory or of another sys.stdout is gone when the next is called.
"""

import asyncio
import contextlib
import faulthandler
import json
import os
import pickle
import resource
import signal
import socket
import sys
import time
import zlib
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from random import seed as seed_random  # as it is before a user's code has run
from typing import Any, NoReturn

from hybridflow.errors import RewardError, UserError
from hybridflow.parallel.child_processes import adopt_orphans, end_with_parent, limit_memory
from hybridflow.rewards.functions import (
    FunctionCall,
    FunctionSpec,
    RewardFunction,
    await_for_parts,
    call_for_parts,
    load_reward_function,
)
from hybridflow.rewards.messages import ChannelClosed, Header, MessageChannel

TOLD_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # a job's, to all of it


@dataclass(frozen=True)
class Loaded:
    """A function, or why it cannot be imported here."""

    spec: FunctionSpec
    function: RewardFunction | None
    problem: str


def run_worker(
    end: socket.socket,
    output: int,
    specs: Mapping[int, FunctionSpec],
    *,
    supervisor: int,
    path: list[str],
    memory_bytes: int | None,
) -> NoReturn:
    """Of a process just forked. end: to the supervisor. output: a pipe, for what is printed. path: of the trainer.

    specs: by number; of one that is awaited alone, or of any that are not.
    """
    end_with_parent(supervisor)
    os.setsid()
    adopt_orphans()
    _put_in_place(end, output)
    _keep_running_when_told_to_end()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes is not None:
        limit_memory(memory_bytes)
    sys.path[:] = path
    loaded = {number: _loaded(spec) for number, spec in specs.items()}
    channel = MessageChannel(end)
    channel.send({"ready": True})
    with contextlib.suppress(ChannelClosed):
        if any(spec.awaited for spec in specs.values()):
            _run_to_end(_serve_many(channel, loaded))
        _serve(channel, loaded)
    os._exit(0)


def _loaded(spec: FunctionSpec) -> Loaded:
    try:
        function = load_reward_function(spec.path)
        return Loaded(spec, function(**spec.arguments) if spec.affine else function, "")
    except UserError as error:
        return Loaded(spec, None, str(error))


def _serve(channel: MessageChannel, loaded: Mapping[int, Loaded]) -> NoReturn:
    """One call after the other."""
    home, own, path = os.getcwd(), os.getpid(), list(sys.path)
    while True:
        channel.wait()
        for header, body in channel.receive():
            found = loaded[header["function"]]
            answer = (_answer_affine if found.spec.affine else _answer)(found, header["unit"], body)
            if os.getpid() != own:  # the function has forked, and the child returned as well
                os._exit(0)
            _tidy(home, path)
            channel.send_all(answer)


def _run_to_end(serving: Coroutine[Any, Any, None]) -> None:
    """As asyncio.run, but that a task of a user's ends no other: by sys.exit, or by a stop of the loop.

    asyncio gives such a task the exception, and ends the loop besides.
    """
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(serving)
        while True:
            try:
                return loop.run_until_complete(task)
            except (SystemExit, KeyboardInterrupt, RuntimeError):
                if task.done():
                    raise


async def _serve_many(channel: MessageChannel, loaded: Mapping[int, Loaded]) -> None:
    """Calls of `async def` functions, beside each other. The supervisor says how many there are at a time."""
    loop, tasks, own = asyncio.get_running_loop(), set[asyncio.Task[None]](), os.getpid()
    ended = loop.create_future()

    async def one(header: Header, body: bytes) -> None:
        found = loaded[header["function"]]
        answer = await (_awaited_affine if found.spec.affine else _awaited)(found, header["unit"], body)
        if os.getpid() != own:
            os._exit(0)
        _flush()
        channel.send_all(answer)

    def arrived() -> None:
        try:
            for header, body in channel.receive():
                task = loop.create_task(one(header, body))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except ChannelClosed as closed:
            loop.remove_reader(channel)
            ended.set_exception(closed)

    loop.add_reader(channel, arrived)
    await ended


def _answer(loaded: Loaded, unit: int, body: bytes) -> Header:
    asked, started = _prepared(loaded, body), time.perf_counter()
    try:
        if loaded.function is None:
            raise RewardError(loaded.problem)
        scores = call_for_parts(loaded.function, asked)
    except BaseException as error:  # nothing that a user raises ends the process
        return _failed(unit, asked, error, started)
    return {"unit": unit, "scores": scores, "seconds": time.perf_counter() - started}


def _answer_affine(loaded: Loaded, unit: int, body: bytes) -> Header:
    """Of a function that checks by itself what a user's code gives: any value of JSON, or an error."""
    started = time.perf_counter()
    try:
        if loaded.function is None:
            raise RewardError(loaded.problem)
        value = loaded.function(pickle.loads(body))  # of the trainer
        json.dumps(value)
    except BaseException as error:  # nothing that a user raises ends the process
        return _failed_affine(unit, error, started)
    return {"unit": unit, "value": value, "seconds": time.perf_counter() - started}


async def _awaited_affine(loaded: Loaded, unit: int, body: bytes) -> Header:
    """The same of one that is awaited. Nobody but the supervisor limits the time."""
    started = time.perf_counter()
    try:
        if loaded.function is None:
            raise RewardError(loaded.problem)
        value = await loaded.function(pickle.loads(body))  # of the trainer
        json.dumps(value)
    except BaseException as error:  # nothing that a user raises ends the process
        return _failed_affine(unit, error, started)
    return {"unit": unit, "value": value, "seconds": time.perf_counter() - started}


def _failed_affine(unit: int, error: BaseException, started: float) -> Header:
    message = str(error) if isinstance(error, UserError) else f"raised {type(error).__name__}: {error}"
    return {"unit": unit, "error": message, "seconds": time.perf_counter() - started}


async def _awaited(loaded: Loaded, unit: int, body: bytes) -> Header:
    asked, started = _prepared(loaded, body), time.perf_counter()
    limit = asyncio.timeout(loaded.spec.timeout_seconds * len(asked.rows))
    try:
        if loaded.function is None:
            raise RewardError(loaded.problem)
        async with limit:
            scores = await await_for_parts(loaded.function, asked)
    except BaseException as error:
        if limit.expired():  # whatever the function has made of the cancellation
            return {"unit": unit, "timeout": True, "seconds": time.perf_counter() - started}
        return _failed(unit, asked, error, started)
    return {"unit": unit, "scores": scores, "seconds": time.perf_counter() - started}


def _prepared(loaded: Loaded, body: bytes) -> FunctionCall:
    """What the function is called with. The generators of random numbers begin with these texts."""
    rows: Mapping[str, Any] = pickle.loads(body)  # of the trainer
    seed = zlib.crc32("\0".join([*rows["prompts"], *rows["responses"]]).encode(errors="backslashreplace"))
    seed_random(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    spec = loaded.spec
    return FunctionCall(
        spec.path,
        rows["prompts"],
        rows["responses"],
        rows["columns"],
        rows["rows"],
        arguments={**spec.arguments, **rows.get("asked", {})},
        parts=spec.parts,
    )


def _failed(unit: int, asked: FunctionCall, error: BaseException, started: float) -> Header:
    message = str(error)
    if not isinstance(error, RewardError):
        message = f"reward function {asked.name}: row {asked.rows[0]}: raised {type(error).__name__}: {error}"
    return {"unit": unit, "error": message, "seconds": time.perf_counter() - started}


def _tidy(home: str, path: list[str]) -> None:
    """What a function may have changed and left so."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    sys.stdout, sys.stderr, sys.path[:] = sys.__stdout__, sys.__stderr__, path
    with contextlib.suppress(OSError):
        os.chdir(home)
    _flush()


def _flush() -> None:
    for stream in (sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed by the function
            stream.flush()  # type: ignore[union-attr]


def _put_in_place(end: socket.socket, output: int) -> None:
    """Standard input is empty, output is the pipe; no other file of the supervisor's stays open."""
    empty = os.open(os.devnull, os.O_RDONLY)
    for number, given in ((0, empty), (1, output), (2, output)):
        os.dup2(given, number)
    keep = end.fileno()
    os.closerange(3, keep)
    os.closerange(keep + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    sys.stdin = open(0, closefd=False, encoding="utf-8")
    sys.stdout, sys.stderr = (open(i, "w", encoding="utf-8", errors="backslashreplace", closefd=False) for i in (1, 2))
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    faulthandler.enable()


def _keep_running_when_told_to_end() -> None:
    """A signal to the whole job is the trainer's to answer. What a function starts ends by it as it would anywhere."""
    for number in TOLD_TO_END:
        signal.signal(number, lambda number, frame: None)

    def as_anywhere() -> None:
        for number in TOLD_TO_END:
            signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=as_anywhere)
