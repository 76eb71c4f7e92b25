"""What a run's start sets before a GPU is used."""

import os

import pytest
import torch

from hybridflow.config import ExperimentConfig
from hybridflow.parallel import platform as platforms
from hybridflow.trainers import loop
from tests.launch import ROOT

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


class Joined(Exception):
    """The ranks would meet now."""


@pytest.mark.parametrize(
    ("overrides", "cuda", "given", "expected"),
    [
        ([], True, None, None),
        (["actor.context_parallel_size=2"], True, None, "32"),
        (["actor.context_parallel_size=2"], True, "1", "1"),
        (["actor.context_parallel_size=2"], False, None, None),
    ],
)
def test_ranks_that_share_tokens_or_experts_have_more_queues(
    overrides: list[str], cuda: bool, given: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def joins(*arguments: object, **named: object) -> None:
        raise Joined

    config = ExperimentConfig.from_yaml(ROOT / "configs" / "quickstart_grpo.yaml", overrides)
    monkeypatch.setenv(VARIABLE, given or "")
    if given is None:
        monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(platforms, "prepare_imports", lambda platform: None)
    monkeypatch.setattr(platforms, "uses_cuda", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "set_device", joins)
    monkeypatch.setattr(platforms, "_single_process_defaults", joins)
    with pytest.raises(Joined):
        loop.start(config, None)
    assert os.environ.get(VARIABLE) == expected
