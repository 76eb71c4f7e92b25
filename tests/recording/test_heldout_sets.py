"""What a run remembers and writes of held-out sets by name."""

import json
from pathlib import Path

from hybridflow.recording.recorder import Recorder
from hybridflow.recording.samples import Sample
from hybridflow.recording.writers import SampleWriter


def test_the_summary_has_the_first_and_the_last_accuracy_of_each_set() -> None:
    recorder = Recorder()
    recorder.before_training({"eval/math/accuracy": 0.25, "eval/code/accuracy": 0.5, "eval/math/score_mean": 3.0})
    recorder.recall([{"eval/math/accuracy": 0.5}, {"eval/math/accuracy": 0.75, "train/tokens_per_sec": 1.0}])
    summary = recorder.summary()
    assert summary.accuracies == {"math": (0.25, 0.75), "code": (0.5, 0.5)} and summary.accuracy_before is None
    assert summary.rows(Path("runs/x"))[:2] == [
        ("accuracy on math", "25.0% -> 75.0% (+50.0 points)"),
        ("accuracy on code", "50.0% -> 50.0% (+0.0 points)"),
    ]


def test_a_sample_names_the_set(tmp_path: Path) -> None:
    """One of the only set has no more fields than one has ever had."""
    writer = SampleWriter(tmp_path / "samples.jsonl")
    own = Sample(kind="heldout", prompt="p", response="r", score=1.0, parts={}, columns={}, set="math")
    writer.write(3, [own, Sample(**{**own, "set": ""})])
    writer.close()
    named, other = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    assert named["set"] == "math" and {**other, "set": "math"} == named and "set" not in other
