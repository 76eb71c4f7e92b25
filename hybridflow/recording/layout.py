"""layout.json of a run directory: which ranks the roles and the engine lie on, for who looks at the run later."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.errors import RunDirError, UserError
from hybridflow.formats.json_text import parse_json
from hybridflow.parallel.layout import Layout, RolloutLayout
from hybridflow.recording.run_dir import replace_file

LAYOUT = "layout.json"


@dataclass(frozen=True)
class RunLayout:
    world_size: int
    roles: Mapping[str, Layout]  # "actor", "reward.models.0", ...
    rollout: RolloutLayout | None  # None: nothing is generated


def write_layout(
    run_dir: Path,
    world_size: int,
    roles: Mapping[str, Layout],
    rollout: RolloutLayout | None,
    kv_cache: Mapping[str, Any] | None = None,
) -> None:
    """A run that resumes in another layout keeps the latest one. kv_cache: the cache's size, for people."""
    tree = {
        "world_size": world_size,
        "roles": {name: _tree(layout) for name, layout in roles.items()},
        "rollout": rollout and _fields(rollout, "tp pp replicas expert_parallel"),
    }
    if kv_cache is not None:
        tree["kv_cache"] = dict(kv_cache)
    replace_file(run_dir / LAYOUT, [json.dumps(tree).encode() + b"\n"])


def _tree(layout: Layout) -> dict[str, Any]:
    return _fields(layout, "tp pp dp vpp ranks ep etp" + " cp" * (layout.cp > 1))


def _fields(layout: Layout | RolloutLayout, names: str) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in names.split()}


def _layout(*, tp: int, pp: int, dp: int, ranks: Sequence[int], cp: int = 1, **more: Any) -> Layout:
    """Older versions wrote dp x cp as dp."""
    return Layout(tp, pp, dp // cp if tp * pp * dp == len(ranks) else dp, tuple(ranks), cp=cp, **more)


def read_layout(run_dir: Path) -> RunLayout | None:
    """None where there is none: versions before it did not write one. Errors: RunDirError where it is damaged."""
    file = run_dir / LAYOUT
    if not file.exists():
        return None
    try:
        tree = parse_json(file.read_bytes(), "")
        roles = {name: _layout(**role) for name, role in tree["roles"].items()}
        engine = tree["rollout"]
        rollout = engine and RolloutLayout(**engine | {"replicas": tuple(map(tuple, engine["replicas"]))})
        return RunLayout(tree["world_size"], roles, rollout)
    except (ValueError, KeyError, TypeError, AttributeError, UserError) as error:
        raise RunDirError(f"{file}: is damaged: {error}") from error
