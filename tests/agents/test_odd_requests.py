"""Thousands of odd requests at a real door: each is answered or refused, and costs no row but its own."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest

from hybridflow.agents.chat_requests import asked_for
from hybridflow.agents.chat_server import MOST_NESTED, parsed_body
from hybridflow.data.rows import RowError
from tests.agents.odd_requests import PLAIN, OddRows, odd_bodies

KNOWN = {"", "invalid_request", "no_continuation", "row_ended", "context_length_exceeded", "repeated"}


@pytest.mark.parametrize(
    ("earlier_turns", "count"),
    [
        ("branch", 1000),
        pytest.param("keep", 2500, marks=pytest.mark.thorough),
        pytest.param("refuse", 2500, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.slow
def test_odd_requests_cost_their_own_rows(earlier_turns: Any, count: int) -> None:
    """Afterwards another row answers as if nothing had been."""
    rows = OddRows(11, earlier_turns)
    found = rows.sent(count)
    assert sum(found.values()) >= count
    assert {status for status, _ in found} == {200, 400} and {code for _, code in found} <= KNOWN
    assert found[200, ""] > count / 20
    assert len(rows.ended) == (0 if earlier_turns == "branch" else found[400, "no_continuation"])
    body = {"model": "policy", "messages": [{"role": "user", "content": "what is it?"}]}
    answer = rows.answer(-1, body)
    assert answer.status_code == 200 and "choices" in answer.json()
    rows.sessions._server.close()


def test_the_bodies_follow_from_the_seed() -> None:
    """And many of them are no JSON, many are nearly right."""
    first = list(islice(odd_bodies(3), 500))
    assert first == list(islice(odd_bodies(3), 500)) != list(islice(odd_bodies(4), 500))
    assert len(set(first)) > 300


def problem(read: Callable[[], Any]) -> str:
    with pytest.raises((RowError, ValueError)) as told:
        read()
    return str(told.value)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"tools": {"type": "function", "function": {"name": "f"}}}, "tools = {'type': 'function', "),
        ({"stop": ["###"]}, "stop = ['###']: is refused, as the model samples as the experiment says: sampling.stop"),
        ({"stop": ["Observation:", "###"]}, "sampling.stop = ['Observation:']"),
        ({"messages": [{"role": "user", "content": "a", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
        ({"messages": [{"role": "user", "content": "a", "thinking": [1]}]}, "messages[0].thinking = [1]: is no text"),
    ],
)
def test_what_is_wrong_is_named(changed: dict[str, Any], expected: str) -> None:
    assert expected in problem(lambda: asked_for({**PLAIN, **changed}, ("Observation:",)))


def test_what_the_experiment_has_already_may_be_asked_for() -> None:
    for stop in ("Observation:", ["Observation:"], None, [], ""):
        assert asked_for({**PLAIN, "stop": stop}, ("Observation:",)).max_tokens == 9
    assert asked_for({**PLAIN, "stop": ["b", "a"]}, ("a", "b")).calls_tools
    assert asked_for({**PLAIN, "parallel_tool_calls": False}).one_call and not asked_for(PLAIN).one_call


def test_a_body_that_is_nested_too_deep_is_refused() -> None:
    assert parsed_body(b"[" * MOST_NESTED + b"1" + b"]" * MOST_NESTED)
    for depth in (MOST_NESTED + 1, 100_000):
        told = problem(lambda depth=depth: parsed_body(b"[" * depth + b"1" + b"]" * depth))
        assert f"more than {MOST_NESTED} deep" in told or "is not JSON" in told
