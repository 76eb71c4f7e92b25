"""`python -O` drops asserts. A user's run stays the same: asserts do nothing, and users' mistakes are errors."""

import ast
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from vllm import CompletionOutput
from vllm.logprobs import FlatLogprobs

import hybridflow
from hybridflow.errors import CheckpointError, ConfigError, DisagreementError, EnvironmentProblem, FlowError, UserError
from hybridflow.flows.run import Run
from hybridflow.formats.distributed_directory import DistributedDirectory
from hybridflow.parallel import peer_processes
from hybridflow.parallel.versions import replace_in
from hybridflow.rollout.engine import _check_stage, response_of
from hybridflow.rollout.loader import AliasLoader
from hybridflow.rollout.routing import SlotRecorder
from hybridflow.trainers import auto
from hybridflow.trainers.fixed_data import FixedDataTrainer
from hybridflow.trainers.online import OnlineTrainer

SOURCES = sorted(Path(hybridflow.__file__).parent.rglob("*.py"))
# all that asserts call; none of these changes anything
PURE = {
    *("Counter", "all", "any", "dim", "hasattr", "is_contiguous", "isinstance", "keys", "len", "list", "map", "prod"),
    *("range", "set", "shard_shape", "sorted", "stride", "sum", "tuple", "values"),
}


def _nodes(kind: type[ast.AST]) -> list[tuple[Path, Any]]:
    return [
        (file, node) for file in SOURCES for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kind)
    ]


@pytest.mark.thorough
def test_asserts_change_nothing() -> None:
    asserts = _nodes(ast.Assert)
    assert len(asserts) > 100
    inside = [(file, node, part) for file, node in asserts for part in ast.walk(node.test)]
    called = {
        ast.unparse(x.func).rsplit(".", 1)[-1]: f"{file}:{n.lineno}" for file, n, x in inside if isinstance(x, ast.Call)
    }
    assert {name: where for name, where in called.items() if name not in PURE} == {}
    assert not [(file, n.lineno) for file, n, x in inside if isinstance(x, ast.NamedExpr | ast.Await | ast.Yield)]


def test_no_handler_waits_for_an_assert() -> None:
    names = [
        file.name
        for file, handler in _nodes(ast.ExceptHandler)
        if handler.type is not None and "AssertionError" in ast.unparse(handler.type)
    ]
    assert names == ["device.py"], "torch without CUDA raises AssertionError itself"


def _completion(num_log_probs: int) -> CompletionOutput:
    log_probs = FlatLogprobs()
    for token in range(num_log_probs):
        log_probs.append_fast([token], [-1.0], iter([1]), [None])
    return CompletionOutput(0, "", [0, 1, 2], None, log_probs)


def _recorder(cache_groups: int) -> object:
    cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=None)] * cache_groups, num_blocks=1)
    return SlotRecorder(SimpleNamespace(model=nn.Linear(1, 1), kv_cache_config=cache), mock.Mock())


def _alias(wanted: torch.Tensor, held: torch.Tensor) -> None:
    loader = SimpleNamespace(_source=lambda name: held)
    AliasLoader._alias(loader, nn.Module(), "weight", nn.Parameter(wanted), "up.weight")  # type: ignore[arg-type]


def _resolved_elsewhere() -> None:
    """A rank reads a config of one kind, and rank 0 has resolved one of another kind."""
    kind = type("OnlineConfig", (), {"from_tree": staticmethod(lambda tree, path: None)})
    with (
        mock.patch.object(auto, "read_tree", return_value={}),
        mock.patch.object(auto, "autos", return_value=True),
        mock.patch.object(auto, "with_neutral", return_value={}),
        mock.patch.object(auto, "load_for_run", return_value=(object(), ())),
    ):
        auto.read_for_run(kind, "mine.yaml")  # type: ignore[type-var]


def _without_proc() -> None:
    with mock.patch.object(peer_processes, "_stat_fields", return_value=None):
        peer_processes.this_process(0)


def _box_outside() -> None:
    stored = SimpleNamespace(info=SimpleNamespace(shape=(4, 2)))
    directory = SimpleNamespace(path=Path("actor"), _stored={"up": stored})
    DistributedDirectory.read_into(directory, "up", (3, 0), torch.empty(2, 2))  # type: ignore[arg-type]


NOTHING_HELD_OUT: Any = SimpleNamespace(inputs=SimpleNamespace(heldout=None))
STALE: Any = SimpleNamespace(algorithm=None, rollout=SimpleNamespace(max_staleness=1))
OTHER_KIND: Any = SimpleNamespace(_config=None, _source=None)
STAGE: Any = SimpleNamespace(model=SimpleNamespace(named_parameters=lambda: [("model.layers.2.up", None)]))


@pytest.mark.parametrize(
    ("call", "error", "parts"),
    [
        (
            lambda: OnlineTrainer(None, replay=Path("runs/a"), rollout_only=True),  # type: ignore[arg-type]
            ConfigError,
            ["replay = runs/a", "rollout_only = True", "one of the two"],
        ),
        (
            lambda: OnlineTrainer(None, replay=Path("runs/a"), source=_without_proc),  # type: ignore[arg-type]
            ConfigError,
            ["replay = runs/a", "source = <function _without_proc", "one of the two"],
        ),
        (
            lambda: OnlineTrainer(STALE, source=_without_proc),  # type: ignore[arg-type]
            ConfigError,
            ["rollout.max_staleness = 1", "a source of your own", "Set rollout.max_staleness=0"],
        ),
        (lambda: OnlineTrainer.evaluate(NOTHING_HELD_OUT), ConfigError, ["data.heldout = null", "needs held-out"]),
        (lambda: FixedDataTrainer.evaluate(NOTHING_HELD_OUT), ConfigError, ["data.heldout = null", "needs held-out"]),
        (lambda: Run.max_length.fget(OTHER_KIND), FlowError, ["run.max_length", "rows of files"]),  # type: ignore
        (lambda: Run._online.fget(OTHER_KIND), FlowError, ["sampling", "rows of files"]),  # type: ignore
        (lambda: Run.take(OTHER_KIND, (), None, {}), FlowError, ["run.take", "rows of files"]),  # type: ignore
        (_resolved_elsewhere, DisagreementError, ["mine.yaml", "a OnlineConfig here", "a object on rank 0"]),
        (_without_proc, EnvironmentProblem, [f"/proc/{os.getpid()}/stat", "needs /proc"]),
        (_box_outside, CheckpointError, ["actor/.metadata", "up has shape (4, 2)", "(2, 2) at (3, 0)"]),
        (lambda: replace_in(ModuleType("other"), gone=1), EnvironmentProblem, ["other", "no gone", "constraints.txt"]),
        (lambda: response_of(_completion(2)), EnvironmentProblem, ["3 tokens", "log-probs of 2 tokens"]),
        (lambda: _recorder(2), EnvironmentProblem, ["0 mixtures", "2 kinds of KV cache"]),
        (lambda: _check_stage(STAGE, ((0, 1), (2, 3)), 1), EnvironmentProblem, ["stage 1", "(2,)", "(2, 3)"]),
        (
            lambda: _alias(torch.empty(2, 3), torch.empty(3, 2)),
            EnvironmentProblem,
            ["up.weight", "(2, 3) torch.float32", "(3, 2) torch.float32"],
        ),
    ],
)
def test_an_error_names_what_is_wrong(call: Callable[[], object], error: type[UserError], parts: list[str]) -> None:
    with pytest.raises(error) as raised:
        call()
    assert [part for part in parts if part not in str(raised.value)] == [], str(raised.value)
