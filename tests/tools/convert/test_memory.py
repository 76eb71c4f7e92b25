"""Peak memory of a conversion: that of its largest tensors, not of the model."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tools.convert.large import CONFIG, make_large, peak_memory

GIB = 1 << 30
ROOM = 14 * 10**9  # three times the checkpoint


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    if shutil.disk_usage(tmp_path).free < ROOM:
        pytest.skip(f"{tmp_path} has less than {ROOM / 1e9:.0f} GB of room")
    yield tmp_path
    shutil.rmtree(tmp_path)  # pytest would keep gigabytes of the last three runs


@pytest.mark.thorough
def test_peak_memory_is_that_of_the_largest_tensors(directory: Path) -> None:
    started = time.perf_counter()
    total, largest = make_large(directory / "source", CONFIG)
    assert total >= 4 * 10**9
    made = time.perf_counter()
    peaks = {"hf-to-megatron": peak_memory("hf-to-megatron", directory / "source", directory / "megatron")}
    shutil.rmtree(directory / "source")
    peaks["megatron-to-hf"] = peak_memory("megatron-to-hf", directory / "megatron", directory / "back")
    print(f"{total / 1e9:.2f} GB made in {made - started:.1f} s, converted in {time.perf_counter() - made:.1f} s")
    for direction, peak in peaks.items():
        print(f"{direction}: peak {peak / 1e6:.0f} MB, allowed {(3 * largest + GIB) / 1e6:.0f} MB")
        assert peak < 3 * largest + GIB, f"{direction}: {peak:,} bytes, the largest tensor has {largest:,}"
