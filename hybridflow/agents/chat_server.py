"""The HTTP server at which agents reach the model: one in the first rank of an engine replica, in a separate thread.

    door = ChatServer("127.0.0.1", token=None, max_model_len=4096)
    url = door.base_url("3-8f0c...")              # of a row; an agent's client takes it as base_url
    for event in door.taken(): ...                # requests that have come, and those whose client has gone
    door.answer(request, completion)              # or door.refuse(request, Refusal(...))

    POST {url}/chat/completions                   plain, or streamed: then all of a turn comes at once, when it is whole
    POST {url less /v1}/inference/v1/generate     tokens in and out, as vLLM has it
    GET {url}/models

The thread reads requests and writes answers. What a request means is for the thread that steps the engine to say, which
owns the rows: events wait for it in a queue, and `fileno` becomes readable with them.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import os
import queue
import threading
import weakref
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from hybridflow.agents.completions import Completion, TokenCompletion, chunks, generated, whole
from hybridflow.errors import ConfigError

MODEL = "policy"  # what the model is called
RETRIES = "x-stainless-retry-count"  # a header of OpenAI's client
MOST_BYTES = 1 << 26  # of a request
MOST_NESTED = 100  # what reads a request goes down by recursion
START_SECONDS = 60.0
END_SECONDS = 0.1  # for requests under way, at the end; with 0 aiohttp would wait for ever
URLS = "/v1/chat/completions, /inference/v1/generate and /v1/models"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Refusal:
    """status: of HTTP. code: a word for programs. 4xx but 408, 409 and 429 are final: OpenAI's client repeats those."""

    status: int
    code: str
    message: str


Answer = Completion | TokenCompletion | Refusal


@dataclass(frozen=True, eq=False)
class ChatRequest:
    """One that waits for an answer. row: the name in the URL. body: JSON, not checked. by_tokens: it has token ids.

    repeated: OpenAI's client has sent the same before, and says that the answer was lost. has_left: whether the
    client's connection has ended.
    """

    row: str
    body: Any
    repeated: bool
    answer: "asyncio.Future[Answer]" = field(repr=False)
    by_tokens: bool = False
    has_left: Callable[[], bool] = field(default=lambda: False, repr=False)


@dataclass(frozen=True)
class Gone:
    """The client of this request no longer waits."""

    request: ChatRequest


class ChatServer:
    """See the module. Errors: ConfigError where the address cannot be listened at."""

    def __init__(self, address: str, *, token: str | None, max_model_len: int) -> None:
        """address: of IP. token: what clients must send as their API key. max_model_len: tokens of a row, at most."""
        self._address, self._token, self._max_model_len = address, token, max_model_len
        self._events = queue.SimpleQueue[ChatRequest | Gone]()
        self._rows_aside: Container[str] = ()
        self._aside: list[ChatRequest | Gone] = []  # events of these rows
        self._readable, self._writable = os.pipe()
        for end in (self._readable, self._writable):
            os.set_blocking(end, False)
        self._loop = asyncio.new_event_loop()
        self._started, self._port, self._problem = threading.Event(), 0, ""
        self._thread = threading.Thread(target=self._serve, name="chat server", daemon=True)
        self._thread.start()
        self.close = weakref.finalize(self, _stop, self._loop, self._thread, (self._readable, self._writable))
        if not self._started.wait(START_SECONDS) or self._problem:
            raise ConfigError(f"data.environment.listen = {address}: cannot be listened at: {self._problem or 'late'}")

    def fileno(self) -> int:
        return self._readable

    def base_url(self, row: str) -> str:
        host = f"[{self._address}]" if ipaddress.ip_address(self._address).version == 6 else self._address
        return f"http://{host}:{self._port}/{row}/v1"

    def take_events(self) -> list[ChatRequest | Gone]:
        """The events since the last call, in order."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._readable, 1 << 16)
        found: list[ChatRequest | Gone] = []
        with contextlib.suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                row = event.row if isinstance(event, ChatRequest) else event.request.row
                (self._aside if row in self._rows_aside else found).append(event)
        if not self._rows_aside:
            found, self._aside = self._aside + found, []
        return found

    def set_aside(self, rows: Container[str]) -> None:
        """Events of these rows wait, by the names in their URLs: whoever asks meanwhile knows nothing of the rows."""
        self._rows_aside = rows

    def take_back(self) -> None:
        """`take_events` has all of them from now on, in order."""
        self._rows_aside = ()

    def answer(self, request: ChatRequest, completion: Completion | TokenCompletion) -> None:
        self._loop.call_soon_threadsafe(_set, request.answer, completion)

    def refuse(self, request: ChatRequest, refusal: Refusal) -> None:
        self._loop.call_soon_threadsafe(_set, request.answer, refusal)

    # ---- in the thread

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = web.AppRunner(
            self._application(), handler_cancellation=True, access_log=None, shutdown_timeout=END_SECONDS
        )
        try:
            self._loop.run_until_complete(self._listen(runner))
        except OSError as error:
            self._problem = error.strerror or str(error)
            return
        finally:
            self._started.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _listen(self, runner: web.AppRunner) -> None:
        await runner.setup()
        await web.TCPSite(runner, self._address, 0).start()
        self._port = runner.addresses[0][1]

    def _application(self) -> web.Application:
        @web.middleware
        async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self._token is not None and not _has_token(request, self._token):
                return _problem(Refusal(401, "invalid_api_key", "the API key is not the word of token_file"))
            try:
                return await handler(request)
            except web.HTTPException as error:
                problem = f"{request.method} {request.path}: {error.reason}; there are {URLS}"
                return _problem(Refusal(error.status, "not_found", problem))

        app = web.Application(client_max_size=MOST_BYTES, middlewares=[checked])
        app.add_routes(
            [
                web.post("/{row}/v1/chat/completions", self._chat),
                web.post("/{row}/inference/v1/generate", self._generate),
                web.get("/{row}/v1/models", self._models),
            ]
        )
        return app

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        return await self._answered(http, by_tokens=False)

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        return await self._answered(http, by_tokens=True)

    async def _answered(self, http: web.Request, *, by_tokens: bool) -> web.StreamResponse:
        try:
            body = parsed_body(await http.read())
        except ValueError as error:
            return _problem(Refusal(400, "invalid_request", f"the request {error}"))
        request = ChatRequest(
            http.match_info["row"],
            body,
            http.headers.get(RETRIES, "0") != "0",
            self._loop.create_future(),
            by_tokens,
            has_left=lambda: http.transport is None or http.transport.is_closing(),
        )
        self._put(request)
        try:
            answer = await request.answer
            if isinstance(answer, Refusal):
                return _problem(answer)
            streams = isinstance(answer, Completion) and bool(body.get("stream"))
            return await _sent(http, answer, streams=streams)
        except (asyncio.CancelledError, ConnectionError):
            self._put(Gone(request))
            raise

    async def _models(self, http: web.Request) -> web.StreamResponse:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "hybridflow"}
        return web.json_response({"object": "list", "data": [model | {"max_model_len": self._max_model_len}]})

    def _put(self, event: ChatRequest | Gone) -> None:
        self._events.put(event)
        with contextlib.suppress(BlockingIOError):  # full: it is readable already
            os.write(self._writable, b"\0")


def parsed_body(raw: bytes) -> Any:
    """Of a request. Errors: ValueError that tells what it is."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    level, depth = [body], 0
    while level := [inner for value in level for inner in _inside(value)]:
        depth += 1
        if depth > MOST_NESTED:
            raise ValueError(f"has objects or lists within each other, more than {MOST_NESTED} deep")
    return body


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


async def _sent(http: web.Request, answer: Completion | TokenCompletion, *, streams: bool) -> web.StreamResponse:
    """Returns when all of it is sent. Errors: ConnectionError where the client has gone meanwhile."""
    if streams and isinstance(answer, Completion):
        return await _streamed(http, answer)
    made = whole(answer, MODEL) if isinstance(answer, Completion) else generated(answer, MODEL)
    response = web.json_response(made)
    await response.prepare(http)
    await response.write_eof()
    return response


async def _streamed(http: web.Request, completion: Completion) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(http)
    for chunk in chunks(completion, MODEL):
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    with contextlib.suppress(ConnectionError):  # a client may leave once it has read that
        await response.write_eof()
    return response


def _has_token(request: web.Request, token: str) -> bool:
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return hmac.compare_digest(given.encode(), token.encode())


def _problem(refusal: Refusal) -> web.Response:
    """As OpenAI's clients read errors."""
    error = {"message": refusal.message, "type": "invalid_request_error", "param": None, "code": refusal.code}
    return web.json_response({"error": error}, status=refusal.status)


def _set(answer: "asyncio.Future[Answer]", value: Answer) -> None:
    if not answer.done():
        answer.set_result(value)


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, pipe: tuple[int, int]) -> None:
    with contextlib.suppress(RuntimeError):  # closed already
        loop.call_soon_threadsafe(loop.stop)
    thread.join(START_SECONDS)
    if thread.is_alive():
        return  # it ends with the process
    loop.close()
    for end in pipe:
        os.close(end)
