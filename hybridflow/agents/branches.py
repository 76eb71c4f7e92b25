"""An agent's row with its sequences, and which of them a request goes on with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybridflow.agents.chat_requests import Asked, AskedTokens
from hybridflow.agents.chat_server import ChatRequest
from hybridflow.agents.transcript import Transcript
from hybridflow.errors import OtherConversation

NewTokens = Callable[[Transcript, Asked | AskedTokens], list[int]]  # Errors: OtherConversation
OTHERWISE = "; data.environment.earlier_turns: branch begins another sequence of the row then"

NO_ROOM = (
    "no token is left for an answer: behind a prompt sampling.max_response_length tokens may stand, and in a further "
    "sequence of a row as many as that and data.max_prompt_length together"
)


@dataclass
class Branch:
    """One of them. request: that the model answers. answered: the last one that it has.

    before: the talk without that request. number: of the row's last request here.
    """

    talk: Transcript
    before: Transcript
    asked: Asked | AskedTokens | None = None
    request: ChatRequest | None = None
    answered: ChatRequest | None = None
    number: int = 0

    @classmethod
    def begun(cls, prompt: list[int]) -> "Branch":
        """Nobody has asked yet."""
        return cls(Transcript(prompt), Transcript(prompt))

    @property
    def settled(self) -> Transcript:
        """Without a request that the model still answers."""
        return self.talk if self.request is None else self.before

    def ask(self, request: ChatRequest, asked: Asked | AskedTokens, ids: Sequence[int], number: int) -> None:
        """The model is to answer a request, whose tokens behind those that are there are `ids`."""
        talk = self.talk
        prompt, behind = with_new(talk, ids)
        messages, fields = (asked.messages, asked.fields) if isinstance(asked, Asked) else (None, talk.fields)
        self.before, self.asked, self.request, self.number = talk, asked, request, number
        self.talk = replace(talk, prompt=prompt, behind=behind, messages=messages, fields=fields)

    def forget(self) -> None:
        """The last request, and its answer where there is one."""
        self.talk, self.request, self.answered = self.before, None, None


@dataclass
class Session:
    """One row. name: in its URL. columns: that the agent gets. agent: its number in the pool, once it runs.

    branches: its sequences, the first with the row's prompt where the data file has one. turn: of the model, in all of
    them; number: with those that were dropped. expected: since when the agent is, on the clock; None while the model
    speaks. spent: the last request was refused since no turn or token is left.
    """

    row: int  # of the rollout
    name: str
    columns: dict[str, Any]
    limit: int
    branches: list[Branch]
    has_prompt: bool
    agent: int | None = None
    begun: float = 0.0
    expected: float | None = None
    turn: int = 0
    number: int = 0
    spent: bool = False

    @property
    def open_requests(self) -> list[ChatRequest]:
        """Those that the model answers."""
        return [branch.request for branch in self.branches if branch.request is not None]

    @property
    def answered(self) -> bool:
        """Whether the model has answered a request."""
        return any(branch.settled.answered for branch in self.branches)


def asked_again(
    branches: Sequence[Branch], request: ChatRequest, asked: Asked | AskedTokens, *, several: bool
) -> ChatRequest | None:
    """The request of which this one is a repetition; None where none is known.

    OpenAI's client says so. Other clients that lose patience end their connection and ask the same again. In a row of
    one conversation nothing but a repetition can be meant by that; sub-agents of a row of `several` may ask the same.
    Of several equal ones nobody knows which client has lost its answer: none. One that has gone already makes room for
    its repetition.
    """
    same = [branch for branch in branches if branch.asked == asked]
    if len(same) != 1:
        return None
    before = same[0].request or same[0].answered
    left = before is not None and not several and before.has_left()
    return before if request.repeated or left else None


def with_new(talk: Transcript, ids: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
    """Prompt and what is behind it once these tokens follow: they are the prompt where there is none yet."""
    return (talk.prompt, (*talk.behind, *ids)) if talk.prompt else (list(ids), ())


def place_of(
    branches: Sequence[Branch], asked: Asked | AskedTokens, new_tokens: NewTokens, *, several: bool
) -> tuple[int, list[int]]:
    """The branch that a request goes on with, the longest that does, and the tokens that are new there.

    several: the number after the last branch where none does; then the tokens are all of the request's. Errors:
    OtherConversation where a row may have one alone; RowError.
    """
    if not several:
        [branch] = branches
        if branch.request is not None:
            raise OtherConversation(
                f"a second request while the model answers one: a row is one conversation{OTHERWISE}"
            )
        try:
            return 0, new_tokens(branch.talk, asked)
        except OtherConversation as error:
            raise OtherConversation(f"{error}{OTHERWISE}") from error
    idle = [number for number, branch in enumerate(branches) if branch.request is None]
    for number in sorted(idle, key=lambda number: -branches[number].talk.tokens):
        try:
            return number, new_tokens(branches[number].talk, asked)
        except OtherConversation:
            continue
    return len(branches), new_tokens(Transcript([]), asked)
