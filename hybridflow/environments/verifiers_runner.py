"""Episodes of a verifiers environment, by the Python that verifiers is installed in: this file is run, not imported.

    PYTHON -P verifiers_runner.py NAME '{"agent": {"runtime": {"type": "subprocess"}}}' play

The first line out tells whether the environment was loaded. With `check` that is all; with `play` each line in is an
episode, and has a line out:

    {"tasks": 64, "problem": ""}
    {"call": 3, "task": 5, "base_url": "http://127.0.0.1:4711/.../v1", "key": "-"}
    {"call": 3, "reward": 1.0, "scores": {"found": 1.0}, "problem": ""}

The environment talks to the model by OpenAI's chat completions: the trainer's own record has the tokens.
"""

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from functools import partial
from typing import Any

KEY_VARIABLE = "HYBRIDFLOW_AGENT_KEY"
MODEL = "policy"
TRACE = "X-Session-ID"
UNTRAINED = "the agent {} of the environment is not trained: give it a model of its own in data.environment.arguments"
SENT_ON = ("Authorization", "Content-Type", "x-stainless-retry-count")


class Switchboard:
    """One URL for all episodes, which sends each request on to the URL of the episode.

    verifiers keeps a client, with connections and certificates, for each URL that it has ever been given. Its requests
    have the number of the trace in a header.
    """

    def __init__(self) -> None:
        self.url, self.urls = "", dict[str, str]()  # by trace
        self.untrained = dict[str, str]()  # by trace, why it is not answered

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

        connections = TCPConnector(limit=0)  # 100 by default: further rows would wait for an answer of these
        async with ClientSession(timeout=ClientTimeout(total=None), connector=connections) as session:

            async def forwarded(request: web.Request) -> web.Response:
                trace = request.headers.get(TRACE, "")
                url = self.urls.get(trace)
                if url is None:
                    problem = self.untrained.get(trace, "the episode has ended")
                    return web.json_response({"error": {"message": problem}}, status=400)
                headers = {name: request.headers[name] for name in SENT_ON if name in request.headers}
                where, body = f"{url}/{request.match_info['rest']}", await request.read()
                async with session.request(request.method, where, data=body, headers=headers) as answer:
                    kind = {"Content-Type": answer.headers.get("Content-Type", "application/json")}
                    return web.Response(body=await answer.read(), status=answer.status, headers=kind)

            app = web.Application(client_max_size=1 << 26)
            app.add_routes([web.route("*", "/v1/{rest:.*}", forwarded)])
            runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            try:
                yield
            finally:
                await runner.cleanup()


class Episodes:
    """Of one environment. Errors of building it: whatever verifiers raises; ValueError."""

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        """name: of the taskset. arguments: of the environment's config, as verifiers has it."""
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        given = {name: value for name, value in arguments.items() if name != "taskset"}
        tree = {**given, "taskset": {**arguments.get("taskset", {}), "id": name}}
        config = resolve_env_config(tree)
        roles = agent_config_fields(config)
        _check_runtimes({role: its.runtime.type for role, its in roles.items()})
        self.environment = load_environment(config)
        self.switchboard = Switchboard()
        bounded = self.environment.taskset.bounded
        self._left: Iterator[Any] = iter(self.environment.taskset)
        self._tasks = list(self._left) if bounded else []
        self.num_tasks = len(self._tasks) if bounded else None

    def task(self, number: int) -> Any:
        """Errors: ValueError where there is no such task."""
        missing = number + 1 - len(self._tasks)
        if missing > 0:
            self._tasks += itertools.islice(self._left, missing)
        if not 0 <= number < len(self._tasks):
            raise ValueError(f"task = {number}: the environment has tasks 0 to {len(self._tasks) - 1}")
        return self._tasks[number]

    async def play(self, number: int, base_url: str, key: str) -> dict[str, Any]:
        """One episode of a task: the reward, scores by name, or a problem."""
        import verifiers.v1 as vf

        os.environ[KEY_VARIABLE] = key  # alike for all episodes
        urls, untrained = self.switchboard.urls, self.switchboard.untrained
        client = vf.EvalClientConfig(base_url=self.switchboard.url, api_key_var=KEY_VARIABLE)
        context, traces, others = vf.ModelContext(model=MODEL, client=client), list[str](), list[str]()

        def begun(trace: Any) -> None:
            if trace.agent.trainable:
                traces.append(trace.id)
                urls[trace.id] = base_url
            else:
                others.append(trace.id)
                untrained[trace.id] = UNTRAINED.format(trace.agent.name)

        try:
            episode = await self.environment.run_episode(self.task(number), context, on_trace=begun)
        finally:
            for trace_id in traces:
                del urls[trace_id]
            for trace_id in others:
                del untrained[trace_id]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            return {"problem": "; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode failed"}
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        if len(trained) != 1 or len(traces) != 1:
            tries = f" in {len(traces)} tries" if len(traces) > len(trained) else ""
            return {"problem": f"the episode has {len(trained)} agents that are trained{tries}; a row is of one"}
        [trace] = trained
        unscored = [name for name, reward in trace.rewards.items() if reward is None]
        if unscored:
            return {"problem": f"no score was given for {', '.join(unscored)}"}
        scores = {name: float(reward.score) for name, reward in trace.rewards.items()}
        return {"reward": float(trace.reward), "scores": scores, "problem": ""}


def _check_runtimes(runtimes: Mapping[str, str]) -> None:
    """verifiers' default runtime is a hosted sandbox, for which nobody has asked who did not name it."""
    for role, kind in runtimes.items():
        if kind == "prime":
            raise ValueError(
                f"{role}.runtime.type = prime: is Prime's hosted sandbox; data.environment.arguments: "
                f"{{{role}: {{runtime: {{type: subprocess}}}}}} runs the agent's program on this machine, docker or "
                f"podman in a container"
            )


async def serve(episodes: Episodes, out: int) -> None:
    """Until the lines end. out: the file that answers go to."""
    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def answer(asked: dict[str, Any]) -> None:
        try:
            outcome = await episodes.play(asked["task"], asked["base_url"], asked["key"])
        except Exception as error:  # the boundary to the code of others
            outcome = {"problem": said(error)}
        tell(out, {"call": asked["call"], **outcome})

    running: dict[int, asyncio.Task[None]] = {}
    async with episodes.switchboard.serving(), episodes.environment.serving():
        tell(out, {"tasks": episodes.num_tasks, "problem": ""})
        while line := await reader.readline():
            asked = json.loads(line)
            if "cancel" in asked:
                if (task := running.get(asked["cancel"])) is not None:
                    task.cancel()
                continue
            task = asyncio.ensure_future(answer(asked))
            running[asked["call"]] = task
            task.add_done_callback(partial(_forget, running, asked["call"]))
        for task in list(running.values()):
            task.cancel()


def _forget(running: dict[int, asyncio.Task[None]], call: int, ended: object) -> None:
    del running[call]


def tell(out: int, message: Mapping[str, Any]) -> None:
    os.write(out, (json.dumps(message) + "\n").encode())


def main(name: str, arguments: str, how: str) -> None:
    """how: check or play."""
    out = os.dup(1)
    os.dup2(2, 1)  # what the environment prints is no answer
    try:
        episodes = Episodes(name, json.loads(arguments))
        if how == "play":
            asyncio.run(serve(episodes, out))
        else:
            tell(out, {"tasks": episodes.num_tasks, "problem": ""})
    except Exception as error:  # the boundary to the code of others
        tell(out, {"problem": said(error)})
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads that others have started


def said(error: BaseException) -> str:
    """In one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


if __name__ == "__main__":
    main(*sys.argv[1:])
