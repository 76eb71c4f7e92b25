"""A profile is measured by two ranks and is the same on both. Nothing here asks how fast it is."""

import json
from pathlib import Path

import pytest

from hybridflow.automap.device import Overheads, load_profile
from tests.launch import run_ranks


@pytest.mark.thorough
@pytest.mark.distributed
def test_two_ranks_measure_one_profile(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run_ranks(2, "tests.automap.profiling.profile_worker", out)
    found = json.loads(out.read_text())
    assert found["profiles"][0] == found["profiles"][1]
    (tmp_path / "profile.json").write_text(found["profiles"][0])
    profile = load_profile(tmp_path / "profile.json")
    assert profile.measured
    assert profile.ranks_per_host == 2
    shapes = {row[:3] for row in profile.products["float32"].table}
    # x W^T of 1 and 64 rows, and the weights' gradients over 64 rows
    assert shapes == {(m, k, k) for m in (1, 64) for k in (64, 256)} | {(64, 64, 64), (256, 64, 256)}
    assert 0 < profile.grouped_efficiency <= 1
    assert profile.sources["grouped_efficiency"].startswith("measured on")
    assert set(profile.products) == {"float32", "bfloat16"}
    assert [one.ranks for one in profile.collectives] == [2]
    assert [row.ranks for row in profile.crowding] == [1, 2]
    assert profile.crowding[0].engine == 1.0
    assert profile.shared is not None
    assert profile.shared.products >= 1  # and twice as much at most, but for what else the machine did
    assert profile.overheads.layer_backward + profile.overheads.layer_forward > 0
    assert profile.overheads.engine_step + profile.overheads.engine_layer > 0
    assert all(getattr(profile.overheads, name) >= 0 for name in Overheads.model_fields)
    assert profile.sources["between"].startswith("not measured")
    assert found["told"][0] == "matrix products by shape"
    assert found["told"][-1].startswith("measured in")
