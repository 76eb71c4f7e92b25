"""layout.json: written by rank 0 when a run starts, read back as it was."""

import json
from pathlib import Path

import pytest

from hybridflow.errors import RunDirError
from hybridflow.parallel.layout import Layout, RolloutLayout
from hybridflow.recording.recorder import record_run
from hybridflow.recording.run_dir import RunLayout, read_layout
from tests.recording.test_resume import config

ROLES = {"actor": Layout(2, 1, 1, (0, 1, 2, 3), cp=2), "reward.models.0": Layout(1, 2, 1, (4, 6), vpp=2)}
ROLLOUT = RolloutLayout(1, 2, ((0, 2), (1, 3)))


def test_rank_0_writes_where_the_run_lies(tmp_path: Path) -> None:
    c = config(tmp_path)
    for rank in (1, 0):
        with record_run(c, 5, rank=rank, decode=str) as recorder:
            recorder.layout(7, ROLES, ROLLOUT)
            assert (c.run_dir / "layout.json").exists() == (rank == 0)
    assert read_layout(c.run_dir) == RunLayout(7, ROLES, ROLLOUT)
    assert json.loads((c.run_dir / "layout.json").read_text())["rollout"] == {
        "tp": 1,
        "pp": 2,
        "replicas": [[0, 2], [1, 3]],
        "expert_parallel": False,
    }
    with record_run(c, 5, rank=0, decode=str, resumed=0) as recorder:  # goes on in another layout
        recorder.layout(2, {"actor": Layout(1, 1, 2, (0, 1))}, RolloutLayout(1, 1, ((0,), (1,))))
    assert read_layout(c.run_dir).world_size == 2


@pytest.mark.parametrize("written", [2, 4])
def test_a_file_has_the_replicas_or_as_before_the_copies_of_the_weights(written: int, tmp_path: Path) -> None:
    actor = {"tp": 1, "pp": 2, "dp": written, "ranks": list(range(8)), "cp": 2}
    (tmp_path / "layout.json").write_text(json.dumps({"world_size": 8, "roles": {"actor": actor}, "rollout": None}))
    found = read_layout(tmp_path)
    assert found is not None and found.roles["actor"] == Layout(1, 2, 2, tuple(range(8)), cp=2)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "it holds list, not an object"),
        ('{"world_size": 1, "roles": {"actor": {"tp": 2, "pp": 1, "dp": 1, "ranks": [0]}}}', "does not fill 1 ranks"),
        ('{"world_size": 1, "roles": {"actor": 3}}', "damaged"),
    ],
)
def test_a_damaged_file_is_told(text: str, why: str, tmp_path: Path) -> None:
    assert read_layout(tmp_path) is None
    (tmp_path / "layout.json").write_text(text)
    with pytest.raises(RunDirError, match=why):
        read_layout(tmp_path)
