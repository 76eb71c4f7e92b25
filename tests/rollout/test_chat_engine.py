"""vLLM's own loading of models that vLLM has to be told about, as for `hybridflow chat`: greedy tokens."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import make_checkpoints, make_window_wrapper, make_wrapper

ROOT = Path(__file__).parents[2]
SIZES = {"num_layers": 4, "head_dim": 32}


def _checkpoint(family: str) -> Callable[[Path], object]:
    return lambda directory: make_checkpoints(directory, family=family, tied=False, num_kv_heads=8, **SIZES)  # type: ignore


MODELS: dict[str, Callable[[Path], object]] = {
    "qwen3_5, with images": lambda directory: make_wrapper(directory / "policy", **SIZES),
    "gemma3, with images": lambda directory: make_window_wrapper(directory / "policy", "gemma3", **SIZES),
    "ministral3, with images": lambda directory: make_window_wrapper(directory / "policy", "ministral3", **SIZES),
    "deepseek_v3": _checkpoint("deepseek_v3"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_a_chat_has_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    MODELS[name](tmp_path)
    command = [sys.executable, "-m", "tests.rollout.chat_worker", str(tmp_path / "policy")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["engine"] == found["transformers"] and len(found["engine"]) > 1
