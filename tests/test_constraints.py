"""launch/constraints*.txt: what pyproject.toml allows, whole, and what the tests run with."""

import sys
import tomllib

import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hybridflow.inspection.versions import PAIRS, within
from tests.constraints import OWN, pinned, wanted
from tests.launch import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ASKED = [
    Requirement(text)
    for texts in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for text in texts
    if not text.startswith(("vllm==", "transformer-engine"))  # for GPUs: the files are made where there is none
]


def test_every_range_has_a_release_that_is_in_it() -> None:
    releases = pinned(OWN)
    outside = [str(one) for one in ASKED if not one.specifier.contains(releases[canonicalize_name(one.name)])]
    assert outside == []


def test_the_releases_are_those_that_the_tests_run_with() -> None:
    """Extras need not be installed."""
    for file, releases in wanted().items():
        if file == OWN or (sys.version_info[:2] == (3, 11) and torch.version.cuda is None):
            differing = sorted(releases.items() - pinned(file).items())
            assert differing == [], f"{file.name}: `python -m tests.constraints` writes it anew"


def test_transformers_is_in_what_goes_with_vllm() -> None:
    [transformers] = [one for one in ASKED if one.name == "transformers"]
    [pair] = [pair for pair in PAIRS if pair.partner == "transformers"]
    releases = ("5.17.9", "5.18.0", "5.19.9", "5.20.0")
    assert [transformers.specifier.contains(release) for release in releases] == [False, True, True, False]
    assert [within(release, pair.accepts) for release in releases] == [True, True, True, False]
