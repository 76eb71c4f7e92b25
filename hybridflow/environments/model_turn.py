"""What an environment is given of a turn of the model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelTurn:
    """A turn of the model.

    text: without the token that ends the turn. truncated: it has met a limit, of tokens or of turns. turn: from 1.
    tokens_left: that turns and answers together may still have. last: the row ends with this call, whatever it returns.
    """

    text: str
    truncated: bool
    turn: int
    tokens_left: int
    last: bool = False
