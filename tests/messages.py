"""Messages for people, compared by what has to be in them and not by their wording."""

import re

# What a message names: `key` at its start, `a_key`, `a.key`, `file.json`, 'value', 3 x 1,
# `module:function`, SomeError: all but ordinary words.
NAMED = re.compile(
    r"^\S+(?=:| = )|\b[A-Z]\w*[A-Z]\w*|\w+:\w+|'[^']*'|`[^`]*`|<[^>]*>|[^\s,;:()'`]*[\d_./=\-][^\s,;()'`]*"
)


class Like:
    """Equal to every message that has the keys, values, files and numbers of this one, whatever the words between."""

    def __init__(self, message: str) -> None:
        self.message = message
        self.named = sorted({word.rstrip(".:,") for word in NAMED.findall(message)} - {"", "-", "="})
        assert self.named, f"{message!r} names nothing"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and not [word for word in self.named if word not in other]

    def __repr__(self) -> str:
        return f"like({self.message!r}), which names {', '.join(self.named)}"

    __hash__ = None


def like(message: str) -> Like:
    return Like(message)
