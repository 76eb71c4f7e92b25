"""Hundreds of damaged checkpoints: each is one clean error, or a conversion whose result has the source's bits."""

import os
import random
import shutil
from pathlib import Path

import pytest

from hybridflow.convert.to_huggingface import to_huggingface
from hybridflow.convert.to_megatron import to_megatron
from hybridflow.convert.verify import verify
from hybridflow.errors import UserError
from tests.tools.convert.damage import HUGGINGFACE, MEGATRON
from tests.tools.convert.tiny import Models, left_in, rewrite, tensors_of

NUM_CASES = 200  # of each of the below
BASES = {"llama": False, "qwen2": True, "mixtral": False}  # family: tied
KINDS = {"huggingface": (HUGGINGFACE, to_megatron), "megatron": (MEGATRON, to_huggingface)}


@pytest.fixture(scope="module")
def bases(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bases")
    for family, tied in BASES.items():
        source = models.copy(root / f"{family}-huggingface", family, tied=tied)
        rewrite(source, {name: x.bfloat16() for name, x in tensors_of(source).items()}, num_files=3)
        to_megatron(source, root / f"{family}-megatron")
    return root


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", BASES)
@pytest.mark.thorough
def test_damage_is_a_clean_error_or_none(
    family: str, kind: str, bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # what is tested needs no disk
    damages, convert = KINDS[kind]
    source, target = tmp_path / "source", tmp_path / "target"
    refused = 0
    for seed in range(NUM_CASES):
        rng = random.Random(f"{family} {kind} {seed}")
        shutil.copytree(bases / f"{family}-{kind}", source)
        damage = damages[seed % len(damages)]
        damage(source, rng)
        try:
            convert(source, target)
            assert verify(source, target) == []
        except UserError as error:
            refused += 1
            assert str(error).strip() and left_in(tmp_path) == ["source"]
        except BaseException as error:
            raise AssertionError(f"seed {seed}, {damage}: {type(error).__name__}: {error}") from error
        for path in (source, target):
            shutil.rmtree(path, ignore_errors=True)
    assert refused > NUM_CASES // 3, "most damage is found; what is not lies in the numbers of weights"
