"""The run's directory: what stands there moves away, unless it is no run."""

from pathlib import Path

from hybridflow.recording.run_dir import open_run_dir


def test_an_earlier_run_moves_and_logs_of_a_start_stay(tmp_path: Path) -> None:
    run = tmp_path / "x"
    assert open_run_dir(run, "first") is None
    assert open_run_dir(run, "second") == tmp_path / "x.1"
    assert (run / "config.yaml").read_text() == "second" and (tmp_path / "x.1" / "config.yaml").read_text() == "first"
    other = tmp_path / "y"
    (other / "logs").mkdir(parents=True)
    (other / "logs" / "node-a.log").write_text("reached")
    assert open_run_dir(other, "first") is None
    assert (other / "logs" / "node-a.log").read_text() == "reached" and not (tmp_path / "y.1").exists()
