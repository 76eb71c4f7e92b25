"""Writes the generated pages of the documentation, and the generated tables within pages written by hand.

    python docs/generate.py             writes what has changed, and prints its names
    python docs/generate.py --check     writes nothing; the exit status is 1 where a page is not current

A page is a pure function of the code and of configs/shapes: no time, no path of a machine, no size of a terminal.
tests/test_docs_generated.py compares all pages with what is committed.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

DOCS = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path.insert(0, str(DOCS.parent))  # before docs/, which is no place of packages

from docs.generator import (  # noqa: E402 (needs that path)
    algorithms,
    api,
    cli,
    config_keys,
    families,
    fields,
    metrics,
    model_facts,
    refused_pairs,
    states,
    statuses,
)

PAGES: Mapping[str, Callable[[], str]] = {
    "reference/cli.md": cli.page,
    "reference/config.md": config_keys.page,
    "reference/refused-pairs.md": refused_pairs.page,
    "reference/metrics.md": metrics.page,
    "reference/exit-statuses.md": statuses.page,
    "reference/algorithms.md": algorithms.page,
    "reference/api.md": api.page,
}
# the first word behind `generated:` -> what writes such a part
PARTS: Mapping[str, Callable[[str], str]] = {
    "family": families.part,
    "layouts": families.part,
    "fields": fields.part,
    "facts": model_facts.part,
    "states": states.part,
}
# in pages written by hand: from `<!-- generated: NAME ... -->` to `<!-- end of generated -->`
MARKED = re.compile(r"(<!-- generated: (?P<what>[^>]*?) -->\n).*?(<!-- end of generated -->)", re.DOTALL)


def pages() -> dict[Path, str]:
    """Every page that is generated, whole or in part, as it should be."""
    found = {DOCS / name: page() for name, page in PAGES.items()}
    for path in sorted(DOCS.rglob("*.md")):
        if path not in found and MARKED.search(text := path.read_text()):
            found[path] = with_parts(text)
    return found


def with_parts(text: str) -> str:
    """A page by hand, its generated parts anew."""

    def renewed(match: re.Match[str]) -> str:
        written = PARTS[match["what"].split()[0]](match["what"])
        return f"{match[1]}\n{written.strip()}\n\n{match[3]}"

    return MARKED.sub(renewed, text)


def stale(found: Mapping[Path, str]) -> list[Path]:
    """The pages that are not committed as they should be."""
    return [path for path, text in found.items() if not path.exists() or path.read_text() != text]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page is not current")
    options = parser.parse_args()
    found = pages()
    changed = stale(found)
    for path in changed:
        print(path.relative_to(DOCS.parent))
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(found[path])
    return 1 if changed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
