"""README, CONTRIBUTING, CHANGELOG and docs/ against the tree: what they name is there, configs that they show load."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hybridflow"
README, ARCHITECTURE = ROOT / "README.md", ROOT / "docs" / "explanation" / "architecture.md"
NOW = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
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


def anchors(document: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


# ------------------------------------------------------------------------------------------------ what is shown


def test_the_flow_in_the_readme_is_that_of_the_file() -> None:
    """tests/flows/test_flows.py trains with the file."""
    flow = (ROOT / "configs" / "best_of_n.py").read_text()
    [shown] = [block for block in fenced(README.read_text(), "python") if "def best_of_n" in block]
    assert shown in flow
