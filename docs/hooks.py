"""What mkdocs does beside its plugins: two pages from the root of the repository, and links to files of the repository.

CONTRIBUTING.md and CHANGELOG.md are pages of the site and lie in docs/ no second time. In Markdown a link to a file is
relative, `../configs/quickstart.yaml`, as on a page of the repository. On the site such a file is not there: the link
leads to the repository where REPOSITORY_URL says where that is, and else is its text alone.
"""

import os
import posixpath
import re
from pathlib import Path
from typing import Any

DOCS = "docs"
FROM_ROOT = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"(^ *```.*?^ *```|`[^`\n]*`(?!\]\())", re.DOTALL | re.MULTILINE)


def on_config(config: Any) -> Any:
    """A link to the repository in the foot of each page, where one is known."""
    if repository := os.environ.get("REPOSITORY_URL"):
        config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": repository, "name": "repository"}]
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    root = Path(config.docs_dir).parent
    for page, source in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(root / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    source = FROM_ROOT.get(page.file.src_uri, f"{DOCS}/{page.file.src_uri}")
    return with_links(markdown, source, page.file.src_uri, {file.src_uri for file in files})


def with_links(markdown: str, source: str, page: str, pages: set[str]) -> str:
    """Links of `source`, a file of the repository, as they are on `page` of the site, which has `pages`."""

    def changed(match: re.Match[str]) -> str:
        target, mark, anchor = match["target"].partition("#")
        if not target or re.match(r"[a-z]+:", target) or match["picture"]:
            return match[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        own = {name: uri for uri, name in FROM_ROOT.items()}.get(file, file.removeprefix(f"{DOCS}/"))
        if own in pages and (file.startswith(f"{DOCS}/") or file in FROM_ROOT.values()):
            return f"[{match['text']}]({posixpath.relpath(own, posixpath.dirname(page) or '.')}{mark}{anchor})"
        if file.startswith(f"{DOCS}/") and file.endswith(".md"):
            return match[0]  # a page that is not there, which mkdocs tells
        repository = os.environ.get("REPOSITORY_URL")
        return f"[{match['text']}]({repository}/blob/main/{file}{mark}{anchor})" if repository else match["text"]

    parts = CODE.split(markdown)
    return "".join(part if i % 2 else LINK.sub(changed, part) for i, part in enumerate(parts))
