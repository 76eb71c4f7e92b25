"""The parts of `python -m tests.gpu` as tests, on a GPU."""

from pathlib import Path

import pytest
import torch

from tests.gpu.parts import PARTS

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_the_part_is_right(part, gpu: torch.device, tmp_path: Path) -> None:
    assert [line for line in part(gpu, tmp_path) if not line.right] == []
