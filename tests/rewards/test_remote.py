"""Reward models behind HTTP: a real server that fails, hangs, answers wrongly, and counts what is under way."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import date
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from hybridflow.config import ExperimentConfig, MetricsConfig
from hybridflow.config.rewards import ScoringConfig
from hybridflow.errors import RewardError
from hybridflow.rewards.remote import filled
from hybridflow.rewards.specs import pool_specs
from tests.rewards.pools import asked, pool_of, rows

pytestmark = pytest.mark.slow  # waits for processes

Answer = Callable[[str, dict, Any], tuple[int, bytes]]


class Server:
    """answer: of (path, headers, JSON) the status and body. Notes what has come, and how many were there at a time."""

    def __init__(self) -> None:
        self.answer: Answer = lambda path, headers, tree: (200, json.dumps({"score": 0.5}).encode())
        self.seen: list[tuple[str, dict, Any]] = []
        self.times: list[float] = []
        self.under_way, self.most, self._lock = 0, 0, threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                tree = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server._lock:
                    server.seen.append((self.path, dict(self.headers), tree))
                    server.times.append(time.monotonic())
                    server.under_way += 1
                    server.most = max(server.most, server.under_way)
                status, body = server.answer(self.path, dict(self.headers), tree)
                with server._lock:  # before it is sent: then the next may come
                    server.under_way -= 1
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except (BrokenPipeError, ConnectionResetError):
                    pass  # it did not want to wait

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/score"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


def remote(server: Server, **changes: Any) -> Any:
    """The function as a config asks for it. A request has long: a busy machine's pause is no second request."""
    given = {"url": server.url, "request_seconds": 60.0, "retries": 2, "backoff_seconds": 0.1} | changes
    config = ExperimentConfig.model_construct(reward=ScoringConfig(remote=[given]), metrics=MetricsConfig())
    (spec,) = pool_specs(config)
    return spec


def test_a_row_is_a_request(server: Server) -> None:
    server.answer = lambda path, headers, tree: (200, json.dumps({"score": len(tree["response"])}).encode())
    with pool_of(remote(server)) as pool:
        assert asked(pool, 0, "four", answer=[4]).scores == ((4.0,),)
        server.answer = lambda path, headers, tree: (200, b"-1.5")
        assert asked(pool, 0, "").scores == ((-1.5,),)
    (path, headers, tree), _ = server.seen
    assert (path, tree) == ("/score", {"prompt": "p", "response": "four", "columns": {"answer": 4}})
    assert "Authorization" not in headers


def test_columns_that_json_has_no_words_for_are_sent_as_others(server: Server) -> None:
    odd = {
        "day": [date(2026, 1, 2)],
        "price": [Decimal("1.50")],
        "picture": [{"bytes": b"\x89PNG", "size": (2, float("inf"))}],
        "score": [float("nan")],
        "vector": [np.array([1, 2])],
        "one": [np.float32(0.5)],
        "half": ["\ud83d"],
    }
    with pool_of(remote(server)) as pool:
        assert asked(pool, 0, "r", **odd).kind == "scored"
    assert server.seen[0][2]["columns"] == {
        "day": "2026-01-02",
        "price": "1.50",
        "picture": {"bytes": "iVBORw==", "size": [2, None]},
        "score": None,
        "vector": [1, 2],
        "one": 0.5,
        "half": "\ud83d",
    }


def test_a_key_is_sent_and_stands_in_no_config(server: Server, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret-1\n")
    with pool_of(remote(server, api_key_file=str(tmp_path / "key"))) as pool:
        assert asked(pool, 0, "r").kind == "scored"
    assert server.seen[0][1]["Authorization"] == "Bearer secret-1"
    for name, text in (("none", None), ("empty", "")):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(RewardError, match=f"reward.remote: api_key_file = .*{name}"):
            remote(server, api_key_file=str(tmp_path / name))


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_fails_is_tried_again_after_longer_and_longer_waits(server: Server, status: int) -> None:
    def third_time(path: str, headers: dict, tree: Any) -> tuple[int, bytes]:
        return (200, b"1") if len(server.seen) == 3 else (status, b"later")

    server.answer = third_time
    with pool_of(remote(server)) as pool:
        assert asked(pool, 0, "r").scores == ((1.0,),)
    waits = [b - a for a, b in zip(server.times, server.times[1:], strict=False)]
    assert len(waits) == 2 and waits[0] >= 0.1 and waits[1] >= 0.2


def test_after_the_last_attempt_it_is_an_error_and_not_a_zero(server: Server) -> None:
    server.answer = lambda path, headers, tree: (503, b"overloaded")
    with pool_of(remote(server)) as pool:
        outcome = asked(pool, 0, "r")
    assert outcome.kind == "error" and len(server.seen) == 3
    assert "row 0: raised ConnectionError: " in outcome.problem
    assert f"{server.url}: no answer in 3 attempts; the last: status 503: overloaded" in outcome.problem


def test_a_server_that_hangs_and_one_that_is_not_there(server: Server) -> None:
    goes_on = threading.Event()
    server.answer = lambda path, headers, tree: (goes_on.wait(30), (200, b"1"))[1]
    gone = Server()
    gone.close()
    with pool_of(remote(server, request_seconds=0.5, retries=1), remote(gone, retries=1)) as pool:
        outcomes = [asked(pool, number, "r") for number in (0, 1)]
    goes_on.set()
    assert [outcome.kind for outcome in outcomes] == ["error", "error"]
    assert "no answer in 2 attempts; the last: none within 0.5 s" in outcomes[0].problem
    assert "no answer in 2 attempts; the last: ConnectError: " in outcomes[1].problem


def test_a_body_that_comes_drop_by_drop_is_no_answer_in_time(server: Server) -> None:
    """Each read is in time, all together are not."""

    def slowly(path: str, headers: dict, tree: Any) -> tuple[int, bytes]:
        return 200, Drops(b" " * 30 + b"1")

    class Drops(bytes):
        pass

    server.answer = slowly
    handler = server._server.RequestHandlerClass
    post = handler.do_POST

    def do_post(self: Any) -> None:
        write = self.wfile.write
        self.wfile.write = lambda body: [(write(bytes([b])), self.wfile.flush(), time.sleep(0.1)) for b in body] and 1
        post(self)

    handler.do_POST = do_post  # type: ignore[method-assign]
    with pool_of(remote(server, request_seconds=0.5, retries=0)) as pool:
        outcome = asked(pool, 0, "r")
    assert outcome.kind == "error" and "no answer in 1 attempts; the last: none within 0.5 s" in outcome.problem


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (404, b"no such model", "status 404: no such model"),
        (401, b"who are you", "status 401: who are you"),
        (200, b"<html>", "answers what is not JSON: '<html>'"),
        (200, b"null", "answers None; expected a finite number"),
        (200, b"true", "answers True; expected a finite number"),
        (200, b"{}", "answers {}; expected a finite number"),
        (200, b'{"score": "1"}', "answers {'score': '1'}; expected a finite number"),
        (200, b'{"score": NaN}', "answers {'score': nan}; expected a finite number"),
        (200, b"[1]", "answers [1]; expected a finite number"),
    ],
)
def test_a_wrong_answer_is_an_error_at_once(server: Server, status: int, body: bytes, expected: str) -> None:
    server.answer = lambda path, headers, tree: (status, body)
    with pool_of(remote(server)) as pool:
        outcome = asked(pool, 0, "r")
    assert outcome.kind == "error" and len(server.seen) == 1
    assert f"{server.url}: {expected}" in outcome.problem


def test_so_many_requests_are_under_way_and_no_more(server: Server) -> None:
    server.answer = lambda path, headers, tree: (time.sleep(0.1), (200, b"1"))[1]
    with pool_of(remote(server, max_in_flight=4), num_workers=3) as pool:
        tickets = [pool.submit(0, rows("r", first=i)) for i in range(16)]
        assert [pool.outcome(ticket).scores for ticket in tickets] == [((1.0,),)] * 16
    assert server.most == 4 and len(server.seen) == 16


def judging(server: Server, says: str) -> Any:
    server.answer = lambda path, headers, tree: (
        200,
        json.dumps({"choices": [{"message": {"role": "assistant", "content": says}}]}).encode(),
    )
    template = "Of {prompt} is {response} like {answer}?"
    return remote(server, kind="openai", model="judge-1", template=template, lowest=-1.0, highest=10.0)


def test_a_judge_is_asked_in_the_words_of_the_template(server: Server) -> None:
    with pool_of(judging(server, "Both say 4, so I give it\n\n**7.5**.")) as pool:
        assert asked(pool, 0, "{prompt} 4", answer=["four"]).scores == ((7.5,),)
    ((path, _, tree),) = server.seen
    assert path == "/score/chat/completions"
    assert tree == {
        "model": "judge-1",
        "messages": [{"role": "user", "content": "Of p is {prompt} 4 like four?"}],
        "temperature": 0,
        "max_tokens": 256,
    }


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("I cannot tell.", "the judge gives no number: 'I cannot tell.'"),
        ("11", "the judge says 11; expected a number from -1 to 10"),
        ("9/20", "the judge says 9/20; expected one number, not a fraction of another scale: '9/20'"),
    ],
)
def test_a_judge_that_gives_no_score_is_an_error(server: Server, says: str, expected: str) -> None:
    with pool_of(judging(server, says)) as pool:
        outcome = asked(pool, 0, "r", answer=[4])
        assert outcome.kind == "error" and expected in outcome.problem
        assert "template: {answer} is none of prompt, response" in asked(pool, 0, "r").problem
        cut = {"choices": [{"message": {"content": "Part 1 is fine. In part 2"}, "finish_reason": "length"}]}
        server.answer = lambda path, headers, tree: (200, json.dumps(cut).encode())
        told = asked(pool, 0, "r", answer=[4]).problem
        assert "the judge is cut (finish_reason length), which is no score: 'Part 1 is fine. In part 2'" in told
        server.answer = lambda path, headers, tree: (200, b'{"choices": []}')
        assert "expected a chat completion" in asked(pool, 0, "r", answer=[4]).problem


def test_only_the_templates_own_names_are_replaced() -> None:
    assert filled("{a} {{b}} {} { a }", {"a": "{b}", "b": 2}) == "{b} {2} {} { a }"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"url": "ftp://x"}, "should match pattern"),
        ({"url": "http://x", "kind": "openai"}, "kind = openai cannot go with model = null"),
        ({"url": "http://x", "lowest": 1.0, "highest": 1.0}, "lowest = 1.0 is not below highest = 1.0"),
        ({"url": "http://x", "max_in_flight": 0}, "greater than 0"),
    ],
)
def test_what_is_no_remote_model_is_refused(given: dict, expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        ScoringConfig(remote=[given])
