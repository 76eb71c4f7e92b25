"""What requests of an agent ask for, and what the door says to them, without an engine."""

import asyncio
import re
import select
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from openai import AuthenticationError, OpenAI

from hybridflow.agents.chat_requests import asked_for, continuation_of, ignored_keys
from hybridflow.agents.chat_server import ChatRequest, ChatServer, Gone, Refusal
from hybridflow.agents.completions import Completion, chunks, whole
from hybridflow.data.rows import RowError
from hybridflow.errors import ConfigError
from tests.agents.addresses import own_address
from tests.agents.agents_of_users import ADD

USER = {"role": "user", "content": "1+1="}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
SAID = {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "annotations": []}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "3"}]}


def body(**more: Any) -> dict[str, Any]:
    return {"model": "gpt", "messages": [USER], **more}


def test_a_request_has_messages_tools_and_a_limit() -> None:
    found = asked_for(body(messages=[USER, SAID, RESULT], tools=[ADD], max_tokens=9, max_completion_tokens=7))
    called = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    assert found.messages == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    assert found.fields == {"tools": [ADD]} and found.max_tokens == 7 and found.calls_tools
    assert not asked_for(body(tools=[ADD], tool_choice="none")).calls_tools and asked_for(body()).max_tokens is None


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([], "the request [] is no JSON object"),
        (body(n=2), "n = 2: is refused"),
        (body(stop=["\n"]), "stop = ['\\n']: is refused"),
        (body(logprobs=True), "logprobs = True: is refused"),
        (body(response_format={"type": "json_object"}), "response_format = {'type': 'json_object'}: is refused"),
        (body(tool_choice="required", tools=[ADD]), "tool_choice = 'required': is refused"),
        (body(colour="red"), "colour = 'red': is no key that is known here"),
        (body(max_tokens=0), "max_tokens = 0: is no number of tokens from 1 on"),
        (body(max_tokens=True), "max_tokens = True: is no number of tokens from 1 on"),
        (body(messages=[]), "messages = [] is empty"),
        (body(messages="1+1"), "messages = '1+1' is a str"),
        (body(messages=[USER, SAID]), "messages ends with one of the assistant"),
        (body(tools=["add"]), "tools[0] = 'add': is no function with a name"),
        (
            body(messages=[{**SAID, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": "{"}}]}, USER]),
            "messages[0].tool_calls[0].function.arguments = '{': is no JSON",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused(given: Any, problem: str) -> None:
    with pytest.raises(RowError, match=re.escape(problem)):
        asked_for(given)


def test_what_clients_send_unasked_is_left_aside() -> None:
    """Values that ask for nothing too."""
    asked_for(body(n=1, stop=None, temperature=0.2, response_format={"type": "text"}, logprobs=False, user="me"))
    assert ignored_keys(body(temperature=0.2, top_p=None, user="me", seed=1)) == {"temperature", "seed"}


def test_a_continuation_is_what_stands_behind_the_conversation() -> None:
    known, given = (asked_for(body(messages=messages)).messages for messages in ([USER], [USER, SAID, RESULT]))
    conversation = [*known, given[1]]
    assert continuation_of(conversation, given) == given[2:]
    without_id = {**given[1], "tool_calls": [{k: v for k, v in given[1]["tool_calls"][0].items() if k != "id"}]}
    assert continuation_of(conversation, [given[0], without_id, given[2]]) == given[2:]
    assert continuation_of(conversation, given[:2]) is None
    assert continuation_of(conversation, [{**USER, "content": "2+2="}, *given[1:]]) is None
    other = {"function": {"name": "add", "arguments": {"a": 1, "b": 3}}}
    assert continuation_of(conversation, [given[0], {**given[1], "tool_calls": [other]}, given[2]]) is None


COMPLETION = Completion("chatcmpl-1", {"role": "assistant", "content": "so", "tool_calls": [CALL]}, "tool_calls", 5, 2)


def test_chunks_say_what_the_whole_says() -> None:
    found = chunks(Completion(**{**vars(COMPLETION), "tells_usage": True}), "policy")
    deltas = [chunk["choices"][0]["delta"] for chunk in found[:-1]]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "so"},
        {"tool_calls": [{"index": 0, **CALL}]},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in found[:-1]] == [None, None, None, "tool_calls"]
    assert found[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    assert not found[-1]["choices"] and whole(COMPLETION, "policy")["usage"] == found[-1]["usage"]


@pytest.fixture()
def door() -> Iterator[ChatServer]:
    made = ChatServer("127.0.0.1", token=None, max_model_len=99)
    yield made
    made.close()


def event(door: ChatServer) -> ChatRequest | Gone:
    """The next one, which the door tells by its file."""
    poll = select.poll()
    poll.register(door.fileno(), select.POLLIN)
    assert poll.poll(10_000), "no request has come"
    [found] = door.take_events()
    return found


def in_a_thread(call: Callable[[], Any]) -> Any:
    return ThreadPoolExecutor(1).submit(call)


def test_a_client_gets_the_answer_to_its_request(door: ChatServer) -> None:
    client = OpenAI(base_url=door.base_url("7-a"), api_key="-", max_retries=0)
    asked = in_a_thread(lambda: client.chat.completions.create(model="gpt", messages=[USER], tools=[ADD]))
    request = event(door)
    assert isinstance(request, ChatRequest) and request.row == "7-a"
    assert request.body == {"model": "gpt", "messages": [USER], "tools": [ADD]}
    door.answer(request, COMPLETION)
    found = asked.result(10)
    assert found.choices[0].message.tool_calls[0].function.arguments == CALL["function"]["arguments"]
    assert (found.choices[0].finish_reason, found.usage.total_tokens) == ("tool_calls", 7)
    assert [(its.id, its.max_model_len) for its in client.models.list()] == [("policy", 99)]


def test_a_refusal_names_its_reason(door: ChatServer) -> None:
    asked = in_a_thread(lambda: httpx.post(f"{door.base_url('7-a')}/chat/completions", json=body()))
    door.refuse(event(door), Refusal(400, "row_ended", "the row has ended"))
    found = asked.result(10)
    assert found.status_code == 400
    assert found.json()["error"] | {"type": ""} == {
        "message": "the row has ended",
        "type": "",
        "param": None,
        "code": "row_ended",
    }


def test_what_is_no_request_is_told_at_once(door: ChatServer) -> None:
    url = door.base_url("7-a")
    broken = httpx.post(f"{url}/chat/completions", content=b"{")
    assert broken.status_code == 400 and "the request is not JSON" in broken.json()["error"]["message"]
    unknown = httpx.post(f"{url}/embeddings", json={})
    assert (
        unknown.status_code == 404
        and "there are /v1/chat/completions, /inference/v1/generate and /v1/models" in unknown.text
    )
    assert door.take_events() == []


def test_a_client_that_goes_away_is_told_of(door: ChatServer) -> None:
    async def leave() -> None:
        async with httpx.AsyncClient() as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await client.post(f"{door.base_url('7-a')}/chat/completions", json=body())

    asyncio.run(leave())
    first, second = _two(door)
    assert isinstance(first, ChatRequest) and isinstance(second, Gone) and second.request is first
    door.answer(first, COMPLETION)  # nobody hears it


def _two(door: ChatServer) -> list[ChatRequest | Gone]:
    found: list[ChatRequest | Gone] = []
    while len(found) < 2:
        poll = select.poll()
        poll.register(door.fileno(), select.POLLIN)
        assert poll.poll(10_000), f"{found} alone have come"
        found += door.take_events()
    return found


def test_a_token_is_asked_for_where_there_is_one() -> None:
    door = ChatServer("127.0.0.1", token="secret", max_model_len=9)
    url = door.base_url("7-a")
    with pytest.raises(AuthenticationError, match="the API key is not the word of token_file"):
        OpenAI(base_url=url, api_key="-", max_retries=0).models.list()
    assert [its.id for its in OpenAI(base_url=url, api_key="secret").models.list()] == ["policy"]
    door.close()


@pytest.mark.parametrize(("family", "loopback"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_a_door_at_another_interface_is_reached_there_alone(family: socket.AddressFamily, loopback: str) -> None:
    """With the word of token_file, whatever is asked for."""
    address = own_address(family)
    if address is None:
        pytest.skip(f"no address of {family.name} by which this host would reach others")
    door = ChatServer(address, token="secret", max_model_len=9)
    url = door.base_url("7-a")
    its = urlsplit(url)
    assert its.hostname == address and its.port
    urls = [f"{url}/chat/completions", f"{url.removesuffix('/v1')}/inference/v1/generate", f"{url}/models"]
    with httpx.Client(trust_env=False, timeout=60) as client:
        for where in urls:
            for headers in ({}, {"Authorization": "Bearer another"}, {"Authorization": "Bearer secrets"}):
                refused = client.request("GET" if where == urls[-1] else "POST", where, json=body(), headers=headers)
                assert refused.status_code == 401, (where, headers)
                assert refused.json()["error"]["code"] == "invalid_api_key", (where, headers)
        assert door.take_events() == [], "nobody has come in"
        asked = in_a_thread(lambda: client.post(urls[0], json=body(), headers={"Authorization": "Bearer secret"}))
        door.answer(event(door), COMPLETION)
        assert asked.result(60).json()["choices"][0]["message"]["content"] == "so"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((loopback, its.port), 10)
    door.close()


def test_an_address_of_another_host_is_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape("data.environment.listen = 192.0.2.7: cannot be listened at")):
        ChatServer("192.0.2.7", token="secret", max_model_len=9)
