"""Models by their name on the HuggingFace Hub: `actor.model: Qwen/Qwen2.5-0.5B`, or at a revision `...-0.5B@REV`.

    fetch_models(tree, weights=True)       where a run begins: what is missing is fetched into the Hub's cache
    cached_directory("Qwen/Qwen2.5-0.5B")            the directory there; a config's `model` is read as that directory

huggingface_hub says where the cache is (HF_HOME, HF_HUB_CACHE), and asks no network with HF_HUB_OFFLINE=1. What is a
directory here, or lies below one, is never taken for a name.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError

NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
SMALL = ["*.json", "*.jinja", "*.model", "*.model.v*", "*.txt", "*.tiktoken"]  # all but weights
WEIGHTS = ["*.safetensors"]
ROLES = ("actor", "critic", "reference", "reward_model")


def is_hub_name(model: str) -> bool:
    """Whether this can only be the name of a repository: neither the directory nor the one it would lie in is here."""
    found = NAME.fullmatch(model)
    return found is not None and not Path(model).exists() and not Path(model).parent.is_dir()


def cached_directory(model: str) -> str:
    """The directory of a repository that has been fetched; `model` as it is where it names none, or was not fetched."""
    if not is_hub_name(model):
        return model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    name, revision = _parts(model)
    try:
        return str(snapshot_download(name, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return model


def fetch_models(tree: Mapping[str, Any], *, weights: bool) -> None:
    """Fetch what a config's models lack in the cache. weights: or else small files alone, which a plan reads.

    Errors: ConfigError naming the key and the model, and what to do where there is no network.
    """
    for key, model in _models(tree):
        if not is_hub_name(model):
            continue
        from huggingface_hub import snapshot_download

        name, revision = _parts(model)
        wanted = [*SMALL, *WEIGHTS] if weights else SMALL
        try:
            snapshot_download(name, revision=revision, allow_patterns=wanted)
        except Exception as error:  # the Hub's, the network's and the disk's are of many kinds
            at = f" --revision {revision}" if revision else ""
            raise ConfigError(
                f"{key} = {model}: is no local directory, and cannot be fetched from the HuggingFace Hub: "
                f"{first_line(error)}. With network, run `hf download {name}{at} --local-dir DIR`, then name DIR"
            ) from error


def _parts(model: str) -> tuple[str, str | None]:
    found = NAME.fullmatch(model)
    assert found is not None, f"{model} is the name of a repository"
    return found["name"], found["revision"]


def _models(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(key, value) of every model that a tree names as text."""
    sections = [(f"{key}.model", tree.get(key)) for key in ROLES]
    reward = tree.get("reward")
    models = reward.get("models") if isinstance(reward, Mapping) else None
    sections += [(f"reward.models.{i}.model", one) for i, one in enumerate(models if isinstance(models, list) else [])]
    for key, section in sections:
        model = section.get("model") if isinstance(section, Mapping) else None
        if isinstance(model, str):
            yield key, model


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
