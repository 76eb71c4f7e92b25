"""Agents whose templates want something: what they are answered, and what of a later turn would be lost."""

from collections.abc import Iterator
from typing import Any

import pytest

from hybridflow.data.continuations import EarlierTurns
from tests.agents.odd_requests import CALL, TOOL, OddRows

ASK = {"role": "user", "content": "what is it?"}


@pytest.fixture()
def made() -> Iterator[list[OddRows]]:
    there: list[OddRows] = []
    yield there
    for rows in there:
        rows.sessions._server.close()


def message(rows: OddRows, *messages: Any, **more: Any) -> dict[str, Any]:
    found = rows.answer(0, {"messages": list(messages), **more})
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]["message"]


@pytest.mark.parametrize("mode", ["refuse", "keep", "branch"])
def test_a_role_that_is_left_out_in_a_later_turn_is_refused(mode: EarlierTurns, made: list[OddRows]) -> None:
    rows = OddRows(1, mode, "roles", ["seven"], num_rows=1)
    made.append(rows)
    said = message(rows, ASK)
    hint = {"role": "developer", "content": "THE HINT"}
    refused = rows.answer(0, {"messages": [ASK, said, hint]})
    assert refused.status_code == 400
    assert "leaves out this message of the role 'developer', 'THE HINT'" in refused.json()["error"]["message"]
    assert message(rows, ASK, said, ASK)["content"] == "seven"


def test_reasoning_that_an_agent_gives_is_not_lost(made: list[OddRows]) -> None:
    """Under a name that the template does not read; where it reads none that is told."""
    told = {"role": "assistant", "content": "six"}
    for kind, answered in (("forgets", True), ("plain", False)):
        rows = OddRows(1, "keep", kind, ["seven"], num_rows=1)
        made.append(rows)
        for spelling in ("reasoning_content", "reasoning", "thinking"):
            found = rows.answer(0, {"messages": [ASK, told | {spelling: "I THINK"}, ASK]})
            assert (found.status_code == 200) == answered
            assert answered or f"messages[1].{spelling} = 'I THINK'" in found.json()["error"]["message"]
            if answered:
                break


@pytest.mark.parametrize(
    ("kind", "says", "more", "num_calls"),
    [
        ("plain", CALL * 2, {}, 2),
        ("plain", CALL * 2, {"parallel_tool_calls": False}, 1),
        ("one call", CALL * 2, {}, 1),
        ("plain", f"<think>shall I {CALL}</think>no", {}, 0),
        ("plain", CALL, {"tool_choice": "none"}, 0),
    ],
)
def test_calls_that_an_agent_gets(
    kind: str, says: str, more: dict[str, Any], num_calls: int, made: list[OddRows]
) -> None:
    """And the conversation goes on with their results."""
    rows = OddRows(1, "refuse", kind, [says], num_rows=1)
    made.append(rows)
    said = message(rows, ASK, tools=[TOOL], **more)
    calls = said.get("tool_calls", [])
    assert len(calls) == num_calls
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "twelve"} for call in calls] or [ASK]
    assert message(rows, ASK, said, *results, tools=[TOOL], **more)["role"] == "assistant"


def test_ids_of_calls_are_as_the_template_wants_them(made: list[OddRows]) -> None:
    """In the answer too, so that an agent may post them back."""
    rows = OddRows(1, "keep", "strict", [CALL], num_rows=1)
    made.append(rows)
    said = message(rows, ASK, tools=[TOOL])
    [call] = said["tool_calls"]
    assert len(call["id"]) == 9 and call["id"].isalnum()
    told = {"role": "tool", "tool_call_id": call["id"], "content": "twelve"}
    assert message(rows, ASK, said, told, tools=[TOOL])["tool_calls"][0]["id"] != call["id"]
