"""Beside pyproject.toml: configs/ of the repository is hybridflow/configs/ of a wheel."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """An editable install has them where they lie."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            copied = Path(self.build_lib) / "hybridflow" / "configs"
            shutil.copytree("configs", copied, dirs_exist_ok=True)
            for file in copied.rglob("*.yaml"):  # whose first lines name the schema, for editors
                file.write_text(file.read_text().replace("/hybridflow/config/schema.json", "/config/schema.json", 1))


setup(cmdclass={"build_py": BuildWithConfigs})
