"""Whether a model that reads the actor's token ids means the same tokens by them.

A size of vocabulary says little: two tokenizers of one size give log-probs, and a KL, that are finite and worthless.
"""

from pathlib import Path

from hybridflow.data.digests import tokenizer_digest
from hybridflow.data.inputs import load_tokenizer
from hybridflow.errors import CheckpointError, ConfigError


def check_same_tokens(name: str, model: Path, actor: Path) -> None:
    """Raise ConfigError where a token of the actor's is another one, or none, in the directory of the role `name`.

    A directory without a tokenizer is taken for one that has been made for the actor's.
    """
    if model == actor or tokenizer_digest(model) == tokenizer_digest(actor):
        return
    try:
        found = load_tokenizer(model).get_vocab()
    except CheckpointError:
        return
    wanted = load_tokenizer(actor).get_vocab()
    wrong = [(index, token) for token, index in wanted.items() if found.get(token) != index]
    if wrong:
        index, token = min(wrong)
        theirs = f"{found[token]} in" if token in found else "unknown to"
        raise ConfigError(
            f"{name}.model = {model}: its tokenizer is another than the actor's: {token!r}, token {index} of {actor}, "
            f"is {theirs} it ({len(wrong)} of {len(wanted)} differ); all models of a run read the actor's token ids"
        )
