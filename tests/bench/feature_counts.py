"""How widely features are spread in the package: files, rooms, imports, classes and lines, of one checkout or two.

    python -m tests.bench.feature_counts [CHECKOUT] [--files]
    python -m tests.bench.feature_counts BEFORE NOW

A room is a directory directly below hybridflow/, or a file there. --files shows which files name a feature, and how.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parents[2]
# Each feature has names of its own, of today and likely later ones. Its generic words name other subjects as well.
# Case does not matter; comments and strings count. A count takes the names alone; the wide count takes both.
FEATURES = {
    "partial rollouts": (
        r"(?:rollout|config|flows)\.partial\b|get\(.partial.\)|partial_?(?:ro(?!tary)|group|gener|note|resp|segm|turn)"
        r"|\bis_partial|check_partial|partial (?:rollout|row|group|response|one)s?\b|\bunder_?way\b|[a-z]_under_way\b"
        r"|(?:rows?|groups?|responses?|prompts)(?: that are| is)? under way|generate_?partly|replica_?work|oversampl"
        r"|open_?(?:rows?|tokens)\b|cuts_?routes|(?:replica|whole|row)_?segments?\b|(?:paused|unfinished|cut)_?rows?\b"
        r"|go(?:es)? on (?:later|in the next)",
        r"\.partial\b(?!\")|under.?way",
    ),
    "staleness, one-step-off": (
        r"staleness|stale_?config|stale.(?:rollout|row|token|weight)|one[ _-]?step[ _-]?off|engines?_?apart"
        r"|next_?rollout|engine_?ranks?\b|engines_?beside|(?:actor|policy|weights?|rollout)_versions?\b",
        r"\bstale\b|batch\.versions|off.policy",
    ),
    "recorded routes": (
        r"routing_?(?:records?|sizes|mismatch|counts|recorder|metrics|of)\b|replay_routing|routing.replay|has_routing"
        r"|(?:check|follow|placed\.|self\.|returned)_?routing\b|(?:models|rollout)\.routing\b|rollout\.recorded\b"
        r"|record_ids?\b|recorded_?(?:pieces?|experts|routes?|routing)|\brecorded\(|routed_?tokens|row_?experts\b"
        r"|as_record\b|is_recorded|(?:cuts|record(?:ed)?|replay(?:ed)?)_routes?|slot_?recorder|actor\.records"
        r"|engine.s experts|experts that the engine|return_routed|route_?records?\b",
        r"\brouting|\broutes?\b|\.records\b|recorder\b",
    ),
    "offline data": (
        r"(?:fixed|offline|static)_?(?:losses|inputs|algorithms?|flow|memory|trainers?|config|digests|runs?)(?![a-z])"
        r"|(?:fixed|offline|static)_?data|offline data|(?:placed?_?|evaluate_)(?:fixed|offline)|example_?dataset",
        r"fixed data|example_?(?:tokens|texts|batches)|\bexamples?\(",
    ),
}
NOT_FEATURES = re.compile(  # taken away first: others' names, and the suffix of files that are being written
    r"functools\.partial|PartialTensor|partial_sums|\.partial[\"/]|n_routed_experts|ROUTING_KERNELS|fp32 routing"
)
START = "hybridflow.flows.groups"
ROW_FILES = (  # where a row of a partial rollout with an environment passes, today or after a renaming
    *("rollout/**/*.py", "roles/generator.py", "roles/environment_turns.py", "roles/engine_replica.py"),
    *("flows/partial*.py", "flows/partial*/**/*.py", "flows/source*.py", "flows/source*/**/*.py"),
)
ROW_NAMES = {"token_ids", "log_probs", "rows"}  # of what holds a row's tokens, or rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="*", help="one, or two: before and now; none: this checkout")
    parser.add_argument("--files", action="store_true", help="show the files that name a feature, of the last checkout")
    options = parser.parse_args()
    checkouts = options.checkouts or [HERE]
    if len(checkouts) > 2 or not all((checkout / "hybridflow").is_dir() for checkout in checkouts):
        parser.error("give one checkout of hybridflow, or two")
    columns = ["before", "now"][-len(checkouts) :]
    counts = [counts_of(checkout) for checkout in checkouts]
    classes = [{name: "x" for name in row_classes(checkout)} for checkout in checkouts]
    for title, found in (("count", counts), ("class with a row", classes)):
        table = Table(title, *columns, box=box.SIMPLE)
        for name in dict.fromkeys(name for each in found for name in each):
            table.add_row(name, *(each.get(name, "") for each in found))
        Console().print(table)
    if options.files:
        for feature in FEATURES:
            for file, words in naming(checkouts[-1], feature, True).items():
                print(f"{feature}: {file}: {', '.join(sorted(words))}")


def counts_of(checkout: Path) -> dict[str, str]:
    found = {}
    for feature in FEATURES:
        for wide in (False, True):
            files = naming(checkout, feature, wide)
            found[f"{feature}, wide" if wide else feature] = (
                f"{len(files)} files of {len({file.parts[0] for file in files})} rooms"
            )
    imported = closure(checkout)
    found["imports of flows.groups"] = str(len(imported) - 1) if imported else "no such module"
    found["classes with a row"] = str(len(set(row_classes(checkout))))
    for directory in ("hybridflow", "tests"):
        sizes = [len(file.read_text(encoding="utf-8").splitlines()) for file in (checkout / directory).rglob("*.py")]
        found[f"lines of {directory}"] = f"{sum(sizes):,}"
    return found


def naming(checkout: Path, feature: str, wide: bool = False) -> dict[Path, set[str]]:
    """Files below hybridflow that name the feature, with the words. wide: generic words count as well."""
    own, generic = FEATURES[feature]
    pattern = re.compile(f"{own}|{generic}" if wide else own, re.IGNORECASE)
    root, found = checkout / "hybridflow", {}
    for file in sorted(root.rglob("*.py")):
        if words := set(pattern.findall(NOT_FEATURES.sub("", file.read_text(encoding="utf-8")))):
            found[file.relative_to(root)] = words
    return found


def closure(checkout: Path) -> set[str]:
    """START and what it imports, directly or not; empty without START.

    Imports in functions and under TYPE_CHECKING count. A package counts where an import names it, not for its modules.
    """
    modules = {}
    for file in (checkout / "hybridflow").rglob("*.py"):
        parts = file.relative_to(checkout).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    found, waiting = set[str](), [START] if START in modules else []
    while waiting:
        if (module := waiting.pop()) not in found:
            found.add(module)
            waiting += modules.keys() & set(imports(ast.parse(modules[module].read_text(encoding="utf-8"))))
    return found


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and not node.level, "the package has no relative imports"
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def row_classes(checkout: Path) -> Iterator[str]:
    """Classes in ROW_FILES whose code has one of ROW_NAMES, with their files."""
    root = checkout / "hybridflow"
    for file in sorted({file for pattern in ROW_FILES for file in root.glob(pattern)}):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names = {getattr(each, field, None) for each in ast.walk(node) for field in ("id", "attr", "arg")}
                if ROW_NAMES & {str(name).lstrip("_") for name in names}:
                    yield f"{node.name}, {file.relative_to(root)}"


if __name__ == "__main__":
    main()
