"""Configs to begin with: the quickstarts that are shipped, whole, with a comment at what a user has to change. Pure.

starters()["grpo"]            .../configs/quickstart_grpo.yaml
starter_text("grpo")          "# GRPO on two CPU cores: ...\nname: ..."
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridflow.config.files import as_flow, read_tree
from hybridflow.config.messages import nearest
from hybridflow.config.shipped import shipped_configs
from hybridflow.errors import ConfigError

PREFIX, PLAIN = "quickstart", "ppo"
SCHEMA = "# yaml-language-server"
HEAD = """\
# {title}.
# Values are those of a quickstart with a tiny model. Change what says CHANGE.
# `hybridflow config keys` lists all keys. `hybridflow plan FILE` shows what fits where. `hybridflow train FILE` trains.
"""
# the end of a key -> what a person has to know who takes the config over
COMMENTS = (
    (r"name", "CHANGE: the directory of the run below output_dir"),
    (r"data\.train", "CHANGE: a file or a directory: JSON, JSON lines, Parquet or Arrow"),
    (r"data\.heldout", "CHANGE: rows for evaluations; null: no evaluation"),
    (r"data\.(max_prompt_length|max_length)", "CHANGE: tokens"),
    (r"sampling\.max_response_length", "CHANGE: tokens, the end token included"),
    (r"(.*\.)?model", "CHANGE: a HuggingFace directory, or a name on the Hub"),
    (r".*\.dtype", "CHANGE: bfloat16 on GPUs; float32 takes twice the memory"),
    (r".*\.tensor_parallel_size", "CHANGE: ranks that a layer is split over; 1 on one GPU"),
    (r".*\.optimizer\.lr", "CHANGE: for the tiny model; large models learn with less, such as 1.0e-6"),
    (r"reward\.functions\.[0-9]+\.function", "CHANGE: package.module:function that scores a response"),
    (r"metrics\.eval_reward", "CHANGE: package.module:function whose 1.0 counts as right"),
    (r"rollout\.kv_cache_gib", "CHANGE: GiB per rank; null on GPUs: by the lengths and the free memory"),
)


def starters() -> dict[str, Path]:
    """Name -> file: `ppo` for quickstart.yaml, `grpo` for quickstart_grpo.yaml."""
    found = {
        path.stem.removeprefix(PREFIX).lstrip("_") or PLAIN: path for path in shipped_configs().glob(f"{PREFIX}*.yaml")
    }
    return dict(sorted(found.items()))


def title(path: Path) -> str:
    """The first sentence of a file's first comment, without the command that runs it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line for line in lines if line.startswith("#") and not line.startswith(SCHEMA)]
    text = " ".join(line.lstrip("# ") for line in comments)
    end = r":\s+(?=`|torchrun)|(?<=\w{3})\.(?=\s|$)"  # of a word: `Dr.` and `al.` end no sentence
    return re.split(end, text, maxsplit=1)[0]


def starter_text(name: str) -> str:
    """A whole config. Errors: ConfigError where there is none of this name."""
    known = starters()
    if name not in known:
        close = nearest(name, known)
        hint = f"did you mean {close}?" if close else f"known are {', '.join(known)}"
        raise ConfigError(f"{name}: there is no such config; {hint}")
    path = known[name]
    sections = ["\n".join(_lines({key: value}, "", "")) for key, value in read_tree(path).items() if _says(value)]
    text = HEAD.format(title=title(path))
    for section in sections:
        text += ("\n" if "\n" in section else "") + section + "\n"
    return text


def _says(value: object) -> bool:
    """Whether it is more than what takes a section of a base away."""
    return value is not None and value != []


def _lines(tree: Mapping[str, Any], prefix: str, indent: str) -> Iterator[str]:
    """YAML, a key a line."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield f"{indent}{key}:"
            yield from _lines(value, f"{path}.", indent + "  ")
        elif isinstance(value, list) and value and all(isinstance(each, dict) and each for each in value):
            yield f"{indent}{key}:"
            for i, each in enumerate(value):
                first, *rest = _lines(each, f"{path}.{i}.", indent + "    ")
                yield from (f"{indent}  - {first.lstrip()}", *rest)
        elif _says(value):
            yield f"{indent}{key}: {as_flow(value)}{_comment(path)}"


def _comment(path: str) -> str:
    found = next((text for pattern, text in COMMENTS if re.fullmatch(pattern, path)), None)
    return "" if found is None else f"  # {found}"
