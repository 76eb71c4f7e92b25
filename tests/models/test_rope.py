"""Logits of whole models with YaRN equal to those of transformers, in a process of its own, as in `test_build`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridflow.convert.forward import largest_difference
from tests.tiny_models import ROPE_YARN, make_checkpoints

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "glm", "mixtral", "qwen3_moe")
WAYS = {  # in which config.json may say it
    "rope_parameters": {"rope_parameters": ROPE_YARN | {"attention_factor": 1.3}},
    "rope_scaling": {
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16},
    },
}


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Model -> largest absolute difference of its logits."""
    root = tmp_path_factory.mktemp("rope")
    for family in FAMILIES:
        made = make_checkpoints(root / family, family=family, tied=False, head_dim=16, std=0.1)
        for way, said in WAYS.items():
            rewrite_config(made / "policy", root / f"{family} {way}", said)
    command = [sys.executable, "-m", "tests.models.test_rope", *map(str, sorted(root.glob("* *")))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def rewrite_config(source: Path, target: Path, said: dict[str, Any]) -> None:
    """The same weights beside a config.json that says `said` of the rotary embedding."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text())
    del config["rope_parameters"]
    (target / "config.json").unlink()
    (target / "config.json").write_text(json.dumps(config | said))


@pytest.mark.thorough
def test_logits_equal_those_of_transformers(differences: dict[str, float]) -> None:
    assert len(differences) == len(FAMILIES) * len(WAYS)
    assert max(differences.values()) <= 1e-5, differences


if __name__ == "__main__":
    paths = [Path(path) for path in sys.argv[1:]]
    print(json.dumps({path.name: largest_difference(path, path) for path in paths}))
