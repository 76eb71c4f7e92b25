"""Models by their name on the HuggingFace Hub: `actor.model: Qwen/Qwen2.5-0.5B`, or at a revision `...-0.5B@REV`.

    fetch_models(tree, weights=True)              where a run begins: what is missing is fetched into the Hub's cache
    fetched("Qwen/Qwen2.5-0.5B", "SRC")           the directory of one model, fetched
    cached_directory("Qwen/Qwen2.5-0.5B")         the directory there; a config's `model` is read as that directory

huggingface_hub says where the cache is (HF_HOME, HF_HUB_CACHE), and asks no network with HF_HUB_OFFLINE=1. What is a
directory here, or lies below one, is never taken for a name. Of a repository only the files of SMALL and WEIGHTS are
fetched. A snapshot with all of these is complete, whatever else the repository holds.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from hybridflow.config.old_keys import ENV_VARS, OLD_ENV_VARS
from hybridflow.config.section import PathText
from hybridflow.errors import ConfigError

NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
SMALL = ["*.json", "*.jinja", "*.model", "*.model.v*", "*.txt", "*.tiktoken"]  # all but weights
WEIGHTS = ["*.safetensors"]
COPIES = ["*/*.safetensors", "consolidated*.safetensors"]  # the same weights, in the formats of others
ROLES = ("actor", "critic", "reference", "reward_model")


def is_hub_name(model: str) -> bool:
    """Whether this can only be the name of a repository: neither the directory nor the one it would lie in is here."""
    found = NAME.fullmatch(model)
    return found is not None and not os.path.exists(model) and not os.path.isdir(os.path.dirname(model))


def cached_directory(model: str) -> str:
    """The directory of a repository that has been fetched; `model` as it is where it names none, or was not fetched."""
    if not is_hub_name(model):
        return model
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return _snapshot(model, weights=False, offline=True)
    except LocalEntryNotFoundError:
        return model


ModelText = Annotated[PathText, AfterValidator(cached_directory)]


def use_variables(tree: Mapping[str, Any]) -> None:
    """Set a config's HF_* variables, which huggingface_hub reads as it loads. What is set already stays.

    A wrong section is left to the check of the config.
    """
    given = tree.get(ENV_VARS, tree.get(OLD_ENV_VARS))
    for name, value in given.items() if isinstance(given, Mapping) else ():
        if str(name).startswith("HF_") and isinstance(value, str | int | float) and "\0" not in str(value):
            os.environ.setdefault(str(name), str(value))


def fetch_models(tree: Mapping[str, Any], *, weights: bool) -> None:
    """Fetch what a config's models lack in the cache. weights: or else small files alone, which a plan reads.

    Errors: ConfigError naming the key and the model, and what to do where there is no network.
    """
    use_variables(tree)
    for key, model in _models(tree):
        fetched(model, key, weights=weights)


def fetched(model: str, key: str, *, weights: bool = True) -> str:
    """The directory of a model, which is fetched where the cache lacks it; `model` itself where it is no Hub's name.

    Errors: ConfigError, as of `fetch_models`.
    """
    if not is_hub_name(model):
        return model
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        try:
            found = _snapshot(model, weights=weights)
        except (HfHubHTTPError, LocalEntryNotFoundError):  # the cache has been looked at, or is not to be
            raise
        except Exception:  # a connection that breaks: the cache may have all
            found = _snapshot(model, weights=weights, offline=True)
    except Exception as error:  # the Hub's, the network's and the disk's are of many kinds
        raise ConfigError(
            f"{key} = {model}: is no local directory, and cannot be fetched from the HuggingFace Hub: "
            f"{_reason(error, *_parts(model))}"
        ) from error
    if weights:
        _check_weights(Path(found), model, key)
    return found


def _check_weights(snapshot: Path, model: str, key: str) -> None:
    """Errors: ConfigError for other formats, and for a revision of which another program has fetched some files."""
    if any(snapshot.glob(WEIGHTS[0])):
        return
    whole = sorted(other.name for other in snapshot.parent.iterdir() if any(other.glob(WEIGHTS[0])))
    hint = f". Another revision is here with weights: {_parts(model)[0]}@{whole[0]}" if whole else ""
    raise ConfigError(f"{key} = {model}: the files of this revision, {snapshot}, have no weights ({WEIGHTS[0]}){hint}")


def _snapshot(model: str, *, weights: bool, offline: bool = False) -> str:
    from huggingface_hub import snapshot_download

    name, revision = _parts(model)
    return str(
        snapshot_download(
            name,
            revision=revision,
            local_files_only=offline,
            allow_patterns=[*SMALL, *WEIGHTS] if weights else SMALL,
            ignore_patterns=COPIES,
        )
    )


def _reason(error: Exception, name: str, revision: str | None) -> str:
    """What was wrong, and what a person does then."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    login = "log in (`hf auth login`) or set HF_TOKEN"
    if isinstance(error, GatedRepoError):
        return f"GatedRepoError: the repository is gated. Accept its terms on its page, then {login}"
    if isinstance(error, RepositoryNotFoundError):
        return f"RepositoryNotFoundError: no such repository, or a private one. Correct the name, or {login}"
    at = f" --revision {revision}" if revision else ""
    return f"{first_line(error)}. With network, run `hf download {name}{at} --local-dir DIR`, then name DIR"


def _parts(model: str) -> tuple[str, str | None]:
    found = NAME.fullmatch(model)
    assert found is not None, f"{model} is the name of a repository"
    return found["name"], found["revision"]


def _models(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, value) of every model that a tree names as text, and of every adapter that training begins with."""
    sections = [(key, tree.get(key)) for key in ROLES]
    reward = tree.get("reward")
    models = reward.get("models") if isinstance(reward, Mapping) else None
    sections += [(f"reward.models.{i}", one) for i, one in enumerate(models if isinstance(models, list) else [])]
    for key, section in sections:
        lora = section.get("lora") if isinstance(section, Mapping) else None
        for inner, field, of in ((section, "model", key), (lora, "adapter_path", f"{key}.lora")):
            named = inner.get(field) if isinstance(inner, Mapping) else None
            if isinstance(named, str):
                yield f"{of}.{field}", named


def first_line(error: Exception) -> str:
    """The error's class and the first words that say what was wrong: httpx begins with a status alone."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    more = lines[1:2] if re.match(r"\d{3} (Client|Server) Error\.", lines[0]) else []
    return f"{type(error).__name__}: {' '.join([lines[0], *more])}"
