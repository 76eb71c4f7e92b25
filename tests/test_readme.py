"""README, CONTRIBUTING, CHANGELOG and docs/ against the tree: what they name is there, what they show is what runs."""

import importlib.util
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml

from hybridflow.algorithm_config import ALGORITHMS
from hybridflow.checkpoint.changes import table_rows
from hybridflow.config import ExperimentConfig
from hybridflow.errors import ExitStatus
from tests.test_structure import floor

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hybridflow"
README, ARCHITECTURE = ROOT / "README.md", ROOT / "docs" / "architecture.md"
NOW = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = [*NOW, ROOT / "CHANGELOG.md"]  # which names what was, too
OF_A_RUN = {"my_experiment.yaml", "config.yaml", "tensorboard/", "batches/", "hf/", "runs/NAME/"}  # not in the tree
OF_A_RUN |= {"checkpoints/", "checkpoints/step_000100/", "logs/"}
SHARED_PARTS = {"name", "policy", "kl", "update"}
NUM_LINES = 40  # that a user's flow stays below

of_documents = pytest.mark.parametrize("document", NOW, ids=lambda path: path.name)


def text_of(document: Path) -> str:
    return re.sub(r"https?://[^\s)]+", "", document.read_text())


def quoted(text: str) -> list[str]:
    """What stands between backticks within a line."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def table(text: str, first_cell: str) -> list[list[str]]:
    """The rows below the header of the table that begins with this cell."""
    lines = text[text.index(f"| {first_cell} |") :].splitlines()[2:]
    rows = lines[: next(i for i, line in enumerate([*lines, ""]) if not line.startswith("|"))]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def anchors(document: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@cache
def source() -> str:
    return "\n".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))


@cache
def file_names() -> frozenset[str]:
    folders = ("hybridflow", "tools", "tests", "configs", "launch", "docs")
    return frozenset(path.name for folder in folders for path in (ROOT / folder).rglob("*"))


@pytest.mark.parametrize("number", range(len(fenced((ROOT / "docs" / "algorithms.md").read_text(), "yaml"))))
def test_the_config_of_every_algorithm_is_one_and_short(number: int, tmp_path: Path) -> None:
    text = fenced((ROOT / "docs" / "algorithms.md").read_text(), "yaml")[number]
    shown = yaml.safe_load(text)
    assert len(text.splitlines()) <= 10 and shown.keys() <= {"sampling", "critic", "reference", "reward", "algorithm"}
    tree = yaml.safe_load((ROOT / "configs" / "quickstart_grpo.yaml").read_text())
    del tree["reference"]
    tree["data"]["prompts_per_iteration"] = 256
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree | shown))
    config = ExperimentConfig.from_yaml(tmp_path / "config.yaml")
    assert config.algorithm.name == shown["algorithm"]["name"]


def test_every_algorithm_has_its_place() -> None:
    shown = [
        yaml.safe_load(text)["algorithm"] for text in fenced((ROOT / "docs" / "algorithms.md").read_text(), "yaml")
    ]
    assert {section["name"] for section in shown} == ALGORITHMS.keys() - {"custom"}


# ------------------------------------------------------------------------------------------------ what is named


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)", text_of(document)):
        linked = document.parent / target if target else document
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


@of_documents
def test_every_file_and_folder_named_exists(document: Path) -> None:
    """By its path from the root, from hybridflow/ or from the document, or by its bare name."""
    text = text_of(document)
    named = set(re.findall(r"(?<![\w./-])[\w.][\w./-]*\.(?:py|yaml|sh|md|svg)\b", text))
    named |= {name for name in quoted(text) if re.fullmatch(r"[\w./-]+/", name)}
    for name in sorted(named - OF_A_RUN):
        places = [root / name for root in (ROOT, PACKAGE, document.parent)]
        assert any(place.exists() for place in places) or name in file_names(), name


@of_documents
def test_every_module_and_console_script_named_is_there(document: Path) -> None:
    text = text_of(document)
    modules = set(re.findall(r"(?:python|torchrun)[^\n|`]* -m ([\w.]+)", text))
    modules |= {name.partition(":")[0] for name in quoted(text) if re.fullmatch(r"(?:hybridflow|tools)\.[\w.:]+", name)}
    for module in sorted(modules):
        assert importlib.util.find_spec(module) is not None, module
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert {name for name in quoted(text) if re.fullmatch(r"hybridflow-[\w-]+", name)} <= set(scripts)


def test_every_metric_named_is_written() -> None:
    areas = "rollout|train|reshard|reward|memory|kl|eval|time"
    named = [name for name in quoted(README.read_text()) if re.fullmatch(rf"(?:{areas})/[a-z_]+", name)]
    assert "rollout/gen_kl" in named
    assert [name for name in named if f'"{name}"' not in source()] == []


def test_every_name_of_the_architecture_exists() -> None:
    """In its text and in its pictures, the pieces of actor.log_probs each."""
    text = ARCHITECTURE.read_text()
    named = [name for name in quoted(text) if re.fullmatch(r"[A-Za-z_.]+", name) and not name.endswith(".py")]
    named += re.findall(r"--(\w+)-->", text)
    words = {word for name in named for word in name.split(".")}
    assert {"Run", "whole", "read_spec", "AliasLoader"} <= words
    assert [word for word in sorted(words) if not re.search(rf"\b{word}\b", source())] == []


# ------------------------------------------------------------------------------------------------ what is shown


def test_the_flow_in_the_readme_is_the_file() -> None:
    flow = (ROOT / "configs" / "best_of_n.py").read_text()
    assert [block for block in fenced(README.read_text(), "python") if "def best_of_n" in block] == [flow]
    assert len(flow.splitlines()) < NUM_LINES
    [section] = [block for block in fenced(README.read_text(), "yaml") if "best_of_n" in block]
    assert section in (ROOT / "configs" / "best_of_n.yaml").read_text()


def test_the_sections_in_the_readme_are_the_configs() -> None:
    named = {name for row in table(README.read_text(), "section") for name in quoted(row[0])}
    words = (str, int, bool)
    sections = {name for name, field in ExperimentConfig.model_fields.items() if field.annotation not in words}
    assert named == sections - {"platform", "device_profile"}  # which are one word each


def test_the_algorithms_in_the_readme_have_their_keys() -> None:
    rows = table(README.read_text(), "`algorithm.name`")
    keys = {quoted(row[0])[0]: set(quoted(row[2])) for row in rows}
    assert keys == {name: set(section.model_fields) - SHARED_PARTS for name, section in ALGORITHMS.items()}


def test_what_a_run_offers_is_there() -> None:
    rows = table(README.read_text(), "of a [`Run`](hybridflow/flows/run.py)")
    words = {word for row in rows for name in quoted(row[0]) for word in re.match(r"[\w.]+", name)[0].split(".")}
    assert {"generate", "whole", "mini_batches", "log_probs", "metrics"} <= words
    assert [word for word in sorted(words) if not re.search(rf"\b(?:def |self\.){word}\b", source())] == []


# ------------------------------------------------------------------------------------------------ the picture


def picture() -> dict[str, int]:
    """Each room and top-level file in the picture, with the floor that it is drawn on."""
    found, level = {}, -1
    for line in fenced(ARCHITECTURE.read_text(), "")[0].splitlines():
        if number := re.match(r" {2}(\d) \|", line):
            level = int(number[1])
        found |= dict.fromkeys(re.findall(r"(?<=[| ])(\w+(?:/|\.py))(?= )", line), level)
    return found


def test_the_picture_has_every_room_on_its_floor() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.name not in ("__init__.py", "__pycache__", "py.typed")}
    drawn = picture()
    assert {name.removesuffix("/") for name in drawn} == rooms
    for name, level in drawn.items():
        room = name.removesuffix("/").removesuffix(".py")
        assert floor(f"hybridflow.{room}") == level, name


def test_the_picture_is_a_rectangle() -> None:
    lines = fenced(ARCHITECTURE.read_text(), "")[0].splitlines()
    assert {len(line) for line in lines} == {95}


def test_the_table_of_changes_is_the_codes() -> None:
    text = (ROOT / "docs" / "long_runs.md").read_text()
    header, ruler, *rows = table_rows()
    assert table(text, "keys") == [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    assert header in text and ruler in text


def test_the_exit_statuses_are_the_codes() -> None:
    rows = table((ROOT / "docs" / "long_runs.md").read_text(), "exit status of a rank")
    assert [int(row[0]) for row in rows] == sorted(ExitStatus)
