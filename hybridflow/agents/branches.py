"""The sequences of an agent's row, and which of these a request goes on with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hybridflow.agents.chat_requests import Asked, AskedTokens
from hybridflow.agents.chat_server import ChatRequest
from hybridflow.errors import OtherConversation
from hybridflow.rollout.rows import Branch, TurnRow

NewTokens = Callable[[Branch, Asked | AskedTokens], list[int]]  # Errors: OtherConversation
OTHERWISE = "; data.environment.earlier_turns: branch begins another sequence of the row then"

NO_ROOM = (
    "no token is left for an answer: behind a prompt sampling.max_response_length tokens may stand, and in a further "
    "sequence of a row as many as that and data.max_prompt_length together"
)


@dataclass
class SequenceRequest:
    """What an agent asks a sequence for. request: that the model answers. answered: the last one that it has.

    number: of the row's last request in the sequence.
    """

    asked: Asked | AskedTokens | None = None
    request: ChatRequest | None = None
    answered: ChatRequest | None = None
    number: int = 0


@dataclass
class Session:
    """What an agent makes of a row. name: in the row's URL. ticket: of the agent's run, once it runs; starts: of those.

    requests: by sequence of the record. number: of requests, with those that were dropped. spent: the last request was
    refused since no turn or token is left.
    """

    record: TurnRow
    name: str
    has_prompt: bool
    requests: list[SequenceRequest] = field(default_factory=lambda: [SequenceRequest()])
    ticket: int | None = None
    starts: int = 0
    number: int = 0
    spent: bool = False

    @property
    def open_requests(self) -> list[ChatRequest]:
        """Those that the model answers."""
        return [each.request for each in self.requests if each.request is not None]

    def room(self, num_opening: int, branch: int, most_opening: int, *, several: bool) -> tuple[str, int]:
        """Why a sequence may not begin with so many tokens, nothing where it may; and how many may follow these.

        All sequences of a row have the same room, but for one that goes on from a prompt of the data file.
        """
        limit = self.record.limit
        if several and (branch or not self.has_prompt):
            return "", most_opening + limit - num_opening
        problem = f"the request has {num_opening} tokens, more than data.max_prompt_length = {most_opening}"
        return problem if num_opening > most_opening else "", limit


def asked_again(
    requests: Sequence[SequenceRequest], request: ChatRequest, asked: Asked | AskedTokens, *, several: bool
) -> ChatRequest | None:
    """The request of which this one is a repetition; None where none is known.

    OpenAI's client says so. Other clients that lose patience end their connection and ask the same again. In a row of
    one conversation nothing but a repetition can be meant by that; sub-agents of a row of `several` may ask the same.
    Of several equal ones nobody knows which client has lost an answer: none. One that has gone already makes room for
    the repetition.
    """
    same = [each for each in requests if each.asked == asked]
    if len(same) != 1:
        return None
    before = same[0].request or same[0].answered
    left = before is not None and not several and before.has_left()
    return before if request.repeated or left else None


def place_of(
    sequences: Sequence[Branch], asked: Asked | AskedTokens, new_tokens: NewTokens, *, several: bool
) -> tuple[int, list[int]]:
    """The sequence that a request goes on with, the longest that does, and the tokens that are new there.

    several: the number after the last sequence where none does; then the tokens are all of the request's. Errors:
    OtherConversation where a row may have one alone; RowError.
    """
    if not several:
        [sequence] = sequences
        if sequence.speaks:
            raise OtherConversation(
                f"a second request while the model answers one: a row is one conversation{OTHERWISE}"
            )
        try:
            return 0, new_tokens(sequence, asked)
        except OtherConversation as error:
            raise OtherConversation(f"{error}{OTHERWISE}") from error
    idle = [number for number, sequence in enumerate(sequences) if not sequence.speaks]
    for number in sorted(idle, key=lambda number: -sequences[number].num_tokens):
        try:
            return number, new_tokens(sequences[number], asked)
        except OtherConversation:
            continue
    return len(sequences), new_tokens(Branch(), asked)
