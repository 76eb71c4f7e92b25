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
            shutil.copytree("configs", Path(self.build_lib) / "hybridflow" / "configs", dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithConfigs})
