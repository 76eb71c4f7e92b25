"""Whether every model that reads or judges token ids means the same tokens by them.

A size of vocabulary says little: two tokenizers of one size give log-probs, scores and a KL that are finite and
worthless.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.config import RunConfig
from hybridflow.config.roles import RewardModelConfig
from hybridflow.data.tokenizers import has_tokenizer, load_tokenizer, tokenizer_digest, unlike_its_file
from hybridflow.errors import ConfigError, remedy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_tokenizers(config: RunConfig) -> list[str]:
    """What was found of all models of a run, a line each. Errors: ConfigError naming the role, the token and both ids.

    A reward model that says `reencode: true` may have another tokenizer.
    """
    trained = config.trained_name
    models = {name: Path(role.model) for name, role in config.roles().items()}
    if not has_tokenizer(models[trained]):
        return []  # which is refused where it is loaded
    others = {name: model for name, model in models.items() if name != trained and model != models[trained]}
    free = {name for name, role in config.roles().items() if isinstance(role, RewardModelConfig) and role.reencode}
    lines = [
        found
        for name, model in others.items()
        if name not in free and (found := check_same_tokens(name, model, models[trained], of=trained)) is not None
    ]
    alike = [name for name, model in others.items() if name not in free and has_tokenizer(model)]
    return lines + ([f"tokenizers: of {', '.join(alike)} as of {trained}"] if alike else [])


def tokenizer_notes(config: RunConfig, tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """What to know of the tokenizers of a run, a line each. tokenizer: of the model that is trained.

    Errors: as `check_tokenizers`; CheckpointError for a tokenizer that makes no tokens of text.
    """
    note = unlike_its_file(Path(config.trained.model), tokenizer)
    return [*([] if note is None else [note]), *check_tokenizers(config)]


def check_same_tokens(name: str, model: Path, actor: Path, *, of: str = "actor") -> str | None:
    """Raise ConfigError where a token of the actor's is another one, or none, in the directory of the role `name`.

    A directory without a tokenizer is taken for one that has been made for the actor's: the line that says so.
    """
    if model == actor:
        return None
    if not has_tokenizer(model):
        return f"{name}.model = {model} has no tokenizer: hybridflow assumes the tokens of {of}.model = {actor}"
    if tokenizer_digest(model) == tokenizer_digest(actor):
        return None
    found, wanted = _vocabulary(model), _vocabulary(actor)
    wrong = [(index, token) for token, index in wanted.items() if found.get(token) != index]
    if wrong:
        index, token = min(wrong)
        theirs = f"{found[token]} in" if token in found else "unknown to"
        settings = {f"{name}.reencode": [True]} if name.startswith("reward.models.") else {f"{name}.model": [actor]}
        raise ConfigError(
            f"{name}.model = {model}: the tokenizer differs from the {of}'s. {token!r}, token {index} of {actor}, is "
            f"{theirs} this tokenizer ({len(wrong)} of {len(wanted)} differ). All models of a run read the {of}'s "
            f"token ids: take a model with the same tokenizer{remedy(settings)}"
        )
    return None


@cache
def _vocabulary(model: Path) -> Mapping[str, int]:
    return load_tokenizer(model).get_vocab()
