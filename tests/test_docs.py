"""README and the pages of docs/ against the code: links, command lines, files, configs, and generated pages.

`tests/pages.py` says how a page excepts a block. tests/test_docs_runs.py runs what a page marks as runnable.
"""

import importlib
import inspect
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs import draw_architecture, generate
from docs.generator.api import NAMES, with_lists
from docs.generator.command_lines import parser_of, subcommands, why_not
from docs.generator.families import CONFIG, LAYOUTS, marks
from docs.generator.fields import objectives_table
from docs.generator.model_facts import LEAN, RAN, facts
from docs.hooks import with_links
from hybridflow.architecture.families import FAMILIES
from hybridflow.cli.main import COMMANDS
from hybridflow.cli.plan import main as plan
from hybridflow.config.files import read_tree
from hybridflow.config.key_list import entries
from hybridflow.config.kinds import config_class
from hybridflow.config.shipped import shipped_configs
from hybridflow.errors import ConfigError
from tests.pages import (
    DOCS,
    OF_ROOT,
    PAGES,
    README,
    ROOT,
    Block,
    anchors_of,
    blocks_of,
    commands_of,
    inline_code,
    links_of,
    num_words,
    sentences_of,
)

CHANGELOG = ROOT / "CHANGELOG.md"  # which names what was, too
NOW = [page for page in PAGES if page != CHANGELOG]
of_pages = pytest.mark.parametrize("page", NOW, ids=lambda path: str(path.relative_to(ROOT)))
TOP = ("configs/", "docs/", "launch/", "tests/", "tools/", "hybridflow/", ".ci/", ".github/")  # of the repository
MODULES = {f"hybridflow.{name}": name for name in COMMANDS}
MODULES |= {"tools.convert": "convert", "tools.make_tiny": "make-tiny"}
MODULES |= {f"hybridflow.cli.{name}": name for name in COMMANDS}
PLACEHOLDER = re.compile(r"[A-Z]")  # a number that a reader puts in
MAX_LINES, MAX_BYTES = 150, 9 * 1024  # of the README
MOST_WORDS = 25  # of a sentence; 20 are the aim
SHORT = ("getting-started", "tutorials", "guides", "explanation", "extend", "models")  # whose sentences are


# ------------------------------------------------------------------------------------------------ links


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Within the repository; anchors too."""
    broken = []
    for link in links_of(page):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists():
            broken.append(f"{link}: there is no {file.relative_to(ROOT)}")
        elif anchor and file.suffix == ".md" and anchor not in anchors_of(file):
            broken.append(f"{link}: {file.name} has no such anchor")
    assert broken == []


def test_every_page_is_in_the_nav_and_the_nav_has_pages() -> None:
    nav = re.sub(r"^.*?^nav:\n", "", (ROOT / "mkdocs.yml").read_text(), flags=re.DOTALL | re.MULTILINE)
    named = set(re.findall(r"([\w./-]+\.md)$", nav, flags=re.MULTILINE))
    own = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert named == own | {"contributing.md", "changelog.md"}


@pytest.mark.parametrize(
    ("link", "source", "page", "expected"),
    [
        ("[a](../configs/a.yaml)", "docs/index.md", "index.md", "a"),
        ("[a](models/b.md#c)", "docs/index.md", "index.md", "[a](models/b.md#c)"),
        ("[a](docs/models/b.md#c)", "CONTRIBUTING.md", "contributing.md", "[a](models/b.md#c)"),
        ("[a](../../CONTRIBUTING.md)", "docs/models/b.md", "models/b.md", "[a](../contributing.md)"),
        ("[a](https://x.org)", "docs/index.md", "index.md", "[a](https://x.org)"),
        ("`[a](../b.py)`", "docs/index.md", "index.md", "`[a](../b.py)`"),
        ("[`a`](../b.py)", "docs/index.md", "index.md", "`a`"),
    ],
)
def test_links_to_the_repository(link: str, source: str, page: str, expected: str, monkeypatch: Any) -> None:
    monkeypatch.delenv("REPOSITORY_URL", raising=False)
    assert with_links(link, source, page, {"index.md", "models/b.md", "contributing.md"}) == expected
    monkeypatch.setenv("REPOSITORY_URL", "https://x.org/y")
    if expected in ("a", "`a`"):
        assert "](https://x.org/y/blob/main/" in with_links(link, source, page, set())


def test_arguments_in_docstrings_become_lists() -> None:
    """On the page of the Python API."""
    text = "Adds.\n\nOf two numbers.\none, other: the\nnumbers\nErrors: none.\n\nMore: text."
    items = "- `one`, `other`: the\n  numbers\n- Errors: none."
    assert with_lists(text) == f"Adds.\n\nOf two numbers.\n\n{items}\n\nMore: text."
    assert with_lists("Computes the\nvalues: see there.") == "Computes the\nvalues: see there."


# ------------------------------------------------------------------------------------------------ command lines


@of_pages
def test_command_lines_are_right(page: Path) -> None:
    """Of each block of commands: options exist, keys exist, files of the repository exist."""
    wrong = [
        f"{block.place}: {' '.join(words)[:80]}: {why}"
        for block in blocks_of(page, "bash")
        if block.is_checked
        for words in commands_of(block.text)
        for why in wrong_in(words)
    ]
    assert wrong == []


@of_pages
def test_command_lines_in_sentences_name_commands_and_options(page: Path) -> None:
    wrong = []
    for text in inline_code(page):
        if text.startswith("hybridflow ") and "..." not in text:
            words = commands_of(text)[0][1:]
            why = why_not([_filled(word) for word in words])
            if (
                words
                and not words[0].isupper()
                and re.search(r"no command|unrecognized arguments: -|invalid choice", why)
            ):
                wrong.append(f"{text}: {why}")
    assert wrong == []


def wrong_in(words: list[str]) -> list[str]:
    """What is wrong with a command. Placeholders, capital letters, stand for what a reader puts in."""
    wrong = [f"there is no {word}" for word in words if not _is_there(word)]
    command = _command_line(words)
    if command is None:
        return wrong
    if isinstance(command, str):
        return [*wrong, command]
    why = why_not([_filled(word) for word in command])
    return [*wrong, *([why] if why else []), *_unknown_keys(command)]


def _command_line(words: list[str]) -> list[str] | str | None:
    """Behind `hybridflow`, of what starts it; what is wrong with a module; None of other commands."""
    first = words[0].removeprefix(".venv/bin/")
    if first == "hybridflow":
        return words[1:]
    if first.startswith("hybridflow-"):
        return [first.removeprefix("hybridflow-"), *words[1:]]
    if first in ("python", "python3", "torchrun") and "-m" in words:
        at = words.index("-m")
        module, rest = words[at + 1], words[at + 2 :]
        if module == "hybridflow":
            return rest
        if module in MODULES:
            return [MODULES[module], *rest]
        path = ROOT.joinpath(*module.split("."))
        ours = module.startswith(("hybridflow", "tools", "tests"))
        if ours and not (path.with_suffix(".py").exists() or path.is_dir()):
            return f"there is no module {module}"
    return None


def _filled(word: str) -> str:
    return "1" if PLACEHOLDER.fullmatch(word) else word


def _is_there(word: str) -> bool:
    """A file of the repository. Names in capital letters and patterns are a reader's; runs leave files in docs/ too."""
    if not word.startswith(TOP) or re.search(r"[*$\[{]|[A-Z]{3}", word):
        return True
    return (ROOT / word.partition("::")[0]).exists()


def _unknown_keys(command: list[str]) -> list[str]:
    if command[:1] not in (["train"], ["plan"], ["launch"], ["health"]) and not command[0].endswith(".yaml"):
        return []
    given = [word.partition("=")[0] for word in command if re.match(r"[a-z_]\w*(\.\w+)*=", word)]
    return [f"{key}: no key" for key in given if not is_key(key.split("."))]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("hybridflow trane x.yaml", "no command"),
        ("hybridflow plan x.yaml --worldsize 8", "unrecognized arguments"),
        ("hybridflow train configs/quickstart.yaml actor.optimiser.lr=1", "no key"),
        ("hybridflow train configs/quickstort.yaml", "there is no configs/quickstort.yaml"),
        ("torchrun --nproc-per-node 2 -m hybridflow.train configs/quickstart.yaml --nope", "unrecognized"),
        ("python -m tests.bench.nothing", "no module"),
        ("torchrun --nproc-per-node 2 -m hybridflow convert A", "invalid choice"),
        ("OMP_NUM_THREADS=1 bash launch/nothing.sh && true", "there is no launch/nothing.sh"),
        ("hybridflow convert hf-to-megatron A", "the following arguments are required"),
    ],
)
def test_what_is_wrong_is_found(line: str, part: str) -> None:
    [words, *_] = commands_of(line)
    assert any(part in why for why in wrong_in(words)), wrong_in(words)


@pytest.mark.parametrize(
    "line",
    [
        "hybridflow configs/quickstart.yaml seed=3  # a comment",
        "hybridflow config init grpo > mine.yaml",
        "hybridflow launch --hostfile hosts --nnodes 2:3 mine.yaml checkpoint.save_interval=10 -- --debug",
        "for seed in 1 2; do hybridflow train mine.yaml seed=$seed; done",
        "hybridflow plan mine.yaml --world-size N",
        "pip install 'hybridflow[cpu]'",
        "hybridflow --help",
    ],
)
def test_what_is_right_is_right(line: str) -> None:
    assert [why for words in commands_of(line) for why in wrong_in(words)] == []


# ------------------------------------------------------------------------------------------------ sentences


def short_pages() -> list[Path]:
    return [page for page in NOW if page == README or page.relative_to(ROOT).parts[:2] in {("docs", x) for x in SHORT}]


def help_texts() -> dict[str, str]:
    """What `hybridflow COMMAND --help` says, by command and option. Indented lines are examples and lists of files."""
    texts = {}
    for name in COMMANDS:
        parsers = [
            (name, parser_of(name)),
            *((f"{name} {child}", each) for child, each in subcommands(parser_of(name))),
        ]
        for command, parser in parsers:
            texts[command] = parser.description or ""
            texts |= {f"{command} {action.dest}": action.help or "" for action in parser._actions}
    return texts


def long_ones(text: str) -> list[str]:
    return [sentence for sentence in sentences_of(text) if num_words(sentence) > MOST_WORDS]


@pytest.mark.parametrize("page", short_pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_of_pages_are_short(page: Path) -> None:
    assert long_ones(page.read_text()) == [], f"at most {MOST_WORDS} words, better 20"


def test_sentences_of_help_are_short() -> None:
    assert [(name, each) for name, text in help_texts().items() for each in long_ones(text)] == []


def test_what_is_a_sentence() -> None:
    text = "# A title\n\nOne [two three](https://x.org/a.b). Four `five six`:\n\n- seven\n- eight\n\n| a | table |\n"
    text += "\n```\nCode. Code.\n```\n\n**Nine.** vLLM ten\neleven"
    found = list(sentences_of(text))
    assert found == ["One two three.", "Four CODE:", "- seven", "- eight", "**Nine.", "vLLM ten eleven"]
    assert [num_words(each) for each in found] == [3, 2, 1, 1, 1, 3]
    assert long_ones(f"{'word ' * MOST_WORDS}end.") and not long_ones(f"{'word ' * (MOST_WORDS - 1)}end.")


# ------------------------------------------------------------------------------------------------ configs


@cache
def known_keys() -> dict[str, str]:
    return {_bare(entry.path): entry.kind for entry in entries()}


def _bare(path: str) -> str:
    """Without places in lists: `data.train` may be one section or a list of them."""
    return re.sub(r"\.[0-9]+(?=\.|$)", "", path)


def is_key(parts: list[str]) -> bool:
    """Of a config, or below a key that holds a mapping of a user's own."""
    path = _bare(".".join(parts))
    path = re.sub(r"^data\.heldout\.\w+(?=\.files|\.samples|\.temperature|\.interval|$)", "data.heldout.NAME", path)
    if path in ("base", "data.heldout.NAME") or path in known_keys():
        return True
    above = [".".join(path.split(".")[:count]) for count in range(1, path.count(".") + 1)]
    return any(re.search("mapping|any value", known_keys().get(each, "")) for each in above)


def keys_in(tree: Any, prefix: tuple[str, ...] = ()) -> list[list[str]]:
    """The path of each key, of those inside lists too."""
    if isinstance(tree, list):
        return [key for each in tree for key in keys_in(each, (*prefix, "0"))]
    if not isinstance(tree, dict):
        return []
    own = [[*prefix, str(key)] for key in tree]
    return own + [key for name, value in tree.items() for key in keys_in(value, (*prefix, str(name)))]


def wrong_in_yaml(block: Block, directory: Path) -> list[str]:
    """A whole config loads; of a part of one the keys exist."""
    tree = yaml.safe_load(block.text)
    if not isinstance(tree, dict):
        return ["no mapping"]
    unknown = [".".join(key) for key in keys_in(tree) if not is_key(key)]
    if unknown:
        return [f"no such keys: {', '.join(unknown)}"]
    if not {"name", "data"} <= tree.keys() and "base" not in tree:
        return []
    file = directory / "config.yaml"
    file.write_text(block.text)
    try:
        found = read_tree(file)
        config_class(found).from_tree(found, file)
    except ConfigError as error:
        return str(error).splitlines()
    return []


@of_pages
def test_configs_load_and_parts_of_them_have_known_keys(page: Path, tmp_path: Path) -> None:
    """A base is one of configs/."""
    for shipped in shipped_configs().iterdir():
        (tmp_path / shipped.name).symlink_to(shipped)
    (tmp_path / "configs").symlink_to(shipped_configs())
    wrong = [
        f"{block.place}: {why}"
        for block in blocks_of(page, "yaml")
        if block.is_checked
        for why in wrong_in_yaml(block, tmp_path)
    ]
    assert wrong == []


@of_pages
def test_python_that_is_shown_is_python(page: Path) -> None:
    for block in blocks_of(page, "python"):
        if block.is_checked:
            compile(block.text, block.place, "exec")


@of_pages
def test_what_stands_above_a_block_is_understood(page: Path) -> None:
    known = r"|run|file: [\w./-]+|not checked: .+|end of .*|generated: .*|Written by .*"
    said = {block.said for block in blocks_of(page)}
    strange = [each for each in said if not re.fullmatch(known, each)]
    assert strange == []


# ------------------------------------------------------------------------------------------------ what is generated


def test_the_pages_of_the_reference_are_current() -> None:
    found = {generate.DOCS / name: page() for name, page in generate.PAGES.items()}
    assert generate.stale(found) == [], "python docs/generate.py writes them anew"


def test_the_tables_of_the_page_on_algorithms_are_current() -> None:
    text = (DOCS / "extend" / "algorithm.md").read_text()
    assert generate.with_parts(text) == text, "python docs/generate.py writes them anew"


def test_the_fields_that_objectives_read_are_those_of_the_code() -> None:
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in objectives_table().splitlines()[2:]]
    assert {what: names for what, names, *_ in rows} == {
        "`run.policy_loss`, `policy.kind` `clip`, `dual_clip`, `gspo`, `cispo`, `sapo`, `reinforce`": (
            "`log_probs`, `advantages`"
        ),
        "more with `policy.importance`": "`rollout_log_probs`",
        "more with `policy.entropy_coef`": "",
        "more with `kl.use: loss`": "`ref_log_probs`",
        "`value_loss(0.2)`": "`values`, `returns`",
        "`value_loss(None)`, without a clip": "`returns`",
        "`negative_log_likelihood()`": "",
    }


def test_the_page_of_the_api_has_every_public_name_and_signatures_as_they_are() -> None:
    text = (DOCS / "reference" / "api.md").read_text()
    assert [name for name in NAMES if f"### `{name}` {{ #{name} }}" not in text] == []
    for name in (name for name in NAMES if name.startswith(("hybridflow.rewards.", "hybridflow.environments."))):
        module, _, last = name.rpartition(".")
        found = getattr(importlib.import_module(module), last)
        described = inspect.getdoc(found)
        assert described is not None and described.splitlines()[0] in text, name
    assert "columns: dict[str, list[Any]],\n    *,\n    answer: str = 'answer',\n) -> list[float]" in text
    assert ":::" not in text


@pytest.mark.thorough
def test_the_layouts_of_models_are_current() -> None:
    found = {path: text for path, text in generate.pages().items() if path.is_relative_to(DOCS / "models")}
    assert 0 < len(found) <= len(FAMILIES)
    assert generate.stale(found) == [], "python docs/generate.py writes them anew"


def test_every_family_has_a_page_with_three_layouts() -> None:
    parts = [mark for page in (DOCS / "models").glob("*.md") for mark in marks(page.read_text())]
    kinds = ("facts", "family", "layouts")
    assert sorted(parts) == sorted(["facts", *(f"{kind} {name}" for kind in kinds for name in FAMILIES)])
    assert LAYOUTS.keys() == FAMILIES.keys()
    for layouts in LAYOUTS.values():
        assert {layout.gpus for layout in layouts} >= {1, 8, 64}


def test_the_facts_of_a_model_are_those_of_code_plans_and_configs() -> None:
    ran, replay, context, adapters, gpus, recipes = facts("Glm4MoeLite")
    assert (ran, replay, gpus) == ("no", "yes", "glm-4.7-flash: 4, LoRA 1")
    assert context == "202,752 tokens, more by `hf_overrides`; context parallelism"
    assert adapters.startswith("`q_a_proj`, `kv_a_proj_with_mqa`, `q_b_proj`, `o_proj`")
    assert re.findall(r"\[(.*?)\]", recipes) == ["glm_4.7_flash_dpo", "glm_4.7_flash_dpo_grpo"]
    assert facts("OPT")[1:3] == ("no experts", "2,048 tokens, no more; context parallelism")


@pytest.mark.parametrize(("gpus", "ep", "status"), [(4, 4, 0), (2, 2, 3)])
def test_the_least_gpus_of_a_model_are_those_of_a_plan(gpus, ep, status, monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    sizes = (f"actor.tensor_parallel_size={gpus}", f"actor.expert_parallel_size={ep}", "actor.sequence_parallel=true")
    given = ("actor.model=configs/shapes/glm-4.7-flash", *LEAN, *sizes, f"rollout.tensor_parallel_size={gpus}")
    assert plan([str(CONFIG), "--world-size", str(gpus), "--memory-gib", "80", *given]) == status, (
        capsys.readouterr().err
    )


def test_models_that_ran_on_a_gpu_are_those_of_the_page_on_gpus() -> None:
    said = (DOCS / "explanation" / "gpus.md").read_text()
    for part in ("GRPO, Llama-3.2-1B's shape", "PPO, four 1B models", "8 layers, 64 experts of 768", "No run has used"):
        assert part in said
    assert RAN.keys() == {"Llama", "Qwen3Moe"}


def test_generated_pages_name_no_machine() -> None:
    """Nor the directory that they were written in."""
    for name in generate.PAGES:
        assert not re.search(r"/(home|root|tmp|work|usr)/", (DOCS / name).read_text()), name


def test_the_picture_is_current() -> None:
    assert draw_architecture.FILE.read_text() == draw_architecture.drawn(), "python docs/draw_architecture.py"


# ------------------------------------------------------------------------------------------------ what is where


def test_the_readme_is_short() -> None:
    assert README.read_text().count("\n") <= MAX_LINES
    assert len(README.read_bytes()) <= MAX_BYTES


def test_the_flow_in_the_readme_is_that_of_the_file() -> None:
    """tests/flows/test_flows.py trains with the file."""
    flow = (ROOT / "configs" / "best_of_n.py").read_text()
    [shown] = [block.text for block in blocks_of(README, "python") if "def best_of_n" in block.text]
    assert shown in flow


@of_pages
def test_pages_tell_no_history(page: Path) -> None:
    """A page says what is there. CHANGELOG.md says what was."""
    assert re.findall(r"(?i)(?:earlier|previous|last) version|version before|used to be", page.read_text()) == []


def test_no_page_stands_twice() -> None:
    """Contributing and changelog are pages of the site by docs/hooks.py."""
    texts: dict[str, list[str]] = {}
    for page in PAGES:
        texts.setdefault(page.read_text(), []).append(page.name)
    assert [names for names in texts.values() if len(names) > 1] == []


def test_the_site_needs_no_network() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in text and "extra_javascript" not in text and "https://" not in text


def test_the_package_has_no_documents() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["packages"]["find"]["include"] == ["hybridflow*"]
    assert not list((ROOT / "hybridflow").rglob("*.md"))


def test_root_has_what_a_contributor_looks_for() -> None:
    assert all(page.exists() for page in OF_ROOT)
    agents = (ROOT / "AGENTS.md").read_text()
    assert agents.count("\n") <= 70
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "license", "version"} <= citation.keys()
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")}
    assert set(forms) == {"bug", "feature", "question", "config"}
    assert "hybridflow env" in (ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text()
