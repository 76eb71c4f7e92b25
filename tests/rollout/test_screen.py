"""What vLLM would draw on the screen while an engine is built."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from torch import nn
from tqdm import tqdm
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import cudagraph_utils

from hybridflow.config import RolloutConfig, SamplingConfig
from hybridflow.parallel.layout import RolloutLayout
from hybridflow.parallel.platform import Platform
from hybridflow.roles.generator import Generator
from hybridflow.rollout.engine import RolloutEngine
from hybridflow.rollout.language_model import LanguageModel
from hybridflow.rollout.patches import without_bars


def bars() -> None:
    """As the two runners draw them while they capture graphs, and the warm-up of compiled kernels."""
    assert list(cudagraph_utils.tqdm([1, 2], desc="Capturing CUDA graphs (FULL)")) == [1, 2]
    assert list(gpu_model_runner.tqdm([1, 2], disable=False, desc="Capturing CUDA graphs (decode, FULL)")) == [1, 2]
    with tqdm([1], desc="JIT kernel warmup (1 compile keys)", disable=False, unit="kernel") as progress:
        for _ in progress:
            progress.set_postfix_str("kernel")


def test_bars_are_drawn_outside_the_block_alone(capsys: pytest.CaptureFixture) -> None:
    with without_bars():
        bars()
    assert capsys.readouterr().err == ""
    bars()
    drawn = capsys.readouterr().err
    assert drawn.count("Capturing CUDA graphs (FULL): 100%") and "JIT kernel warmup" in drawn


def test_bars_come_back_after_an_error(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError), without_bars():
        raise ZeroDivisionError
    list(tqdm([1], desc="again"))
    assert "again" in capsys.readouterr().err


def test_an_engine_is_built_without_bars(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    class Ends(Exception):
        """Nothing is left to build."""

    class LLM:
        def __init__(self, **arguments: Any) -> None:
            bars()
            raise Ends

    monkeypatch.setattr(vllm, "LLM", LLM)
    with pytest.raises(Ends):
        RolloutEngine(
            SimpleNamespace(),
            lambda name: torch.empty(0),
            dtype="float32",
            language_model=LanguageModel("LlamaForCausalLM", tied=False),
            layout=RolloutLayout(1, 1, ((0,),)),
            stages=((0,),),
            max_length=8,
            sampling=SamplingConfig(max_response_length=4),
            config=RolloutConfig(),
            kv_cache_bytes=1 << 20,
            block_tokens=16,
            platform=Platform(torch.device("cpu"), 0, 0, 1),
        )
    assert capsys.readouterr().err == "" and "vllm" in sys.modules


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        (
            (1, 2, 4, 512),
            "built the engine in 29 s, with 4 sizes of CUDA graphs, of 1 to 512 tokens a step, and at "
            "most 512 sequences",
        ),
        ((), None),
    ],
)
def test_graphs_are_said_in_one_line(sizes: tuple[int, ...], line: str | None) -> None:
    class Engine:
        build_seconds, most_rows = 29.2, 512
        graph_sizes = staticmethod(lambda: sizes)
        _model_runner = staticmethod(lambda: SimpleNamespace(model=nn.Linear(1, 1)))

    said = [] if line is None else [line]
    assert RolloutEngine.notes(Engine()) == said  # type: ignore[arg-type]

    class Built:
        kv_cache = SimpleNamespace(is_given=True)
        why_eager = None
        engine = SimpleNamespace(notes=lambda: said)

    assert Generator.notes(Built()) == [f"rollout: {each}" for each in said]  # type: ignore[arg-type]
