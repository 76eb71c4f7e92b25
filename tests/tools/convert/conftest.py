from pathlib import Path

import pytest

from tests.tools.convert.tiny import Models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def source(models: Models, tmp_path: Path) -> Path:
    """A Llama of one's own."""
    return models.copy(tmp_path / "source")
