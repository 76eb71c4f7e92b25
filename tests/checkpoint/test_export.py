"""Export and loading of models with many experts: how often things are done, counted, not timed.

The ranks of a pipeline run one after the other here, the last first; what they send lies in queues.
"""

import dataclasses
import json
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig

import hybridflow
from hybridflow.architecture import parts, shards, weights
from hybridflow.architecture.parts import read_shard, shard_shape
from hybridflow.architecture.spec import ModelSpec, read_spec
from hybridflow.architecture.weight import Weight
from hybridflow.architecture.weight_files import open_checkpoint
from hybridflow.architecture.weights import staged_weights
from hybridflow.checkpoint import export
from hybridflow.checkpoint.export import export_huggingface
from hybridflow.convert.to_megatron import to_megatron
from hybridflow.formats.safetensors_files import SafetensorsDirectory
from hybridflow.parallel.grid import Grid
from hybridflow.parallel.layout import Cut, Layout, Place

PACKAGE = str(Path(hybridflow.__file__).parent)
NUM_LAYERS = 2
SIZES = (8, 16, 32)  # experts


class FakeActor:
    """The weights of the first of `tp` ranks of a stage, of two, and how often somebody asked for them."""

    def __init__(self, spec: ModelSpec, pp_rank: int, tp: int) -> None:
        layout = Layout(tp, 2, 1, tuple(range(2 * tp)))
        self.spec, self.head, self.asked = spec, "lm", 0
        groups: Any = SimpleNamespace(tp=None, pp=None, tp_ep=None)
        self.grid = Grid(layout, layout.at(0, 0, pp_rank), groups)
        table = staged_weights(spec, "lm", layout.stages(spec.num_layers))
        self._weights = {
            weight.megatron: (weight, values_of(weight, spec, tp)) for weight, stage in table if stage == pp_rank
        }

    def weights(self) -> dict[str, tuple[Weight, Tensor]]:
        self.asked += 1
        return dict(self._weights)


def values_of(weight: Weight, spec: ModelSpec, tp: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, weight.megatron)))
    return torch.randn(shard_shape(weight, spec, Cut(tp, tp)), generator=generator)


class FakeDistributed:
    """torch.distributed of two ranks that run one after the other."""

    def __init__(self) -> None:
        self._sent: dict[int, deque[Tensor]] = defaultdict(deque)
        self.rank = 0

    def gather(self, shard: Tensor, shards: list[Tensor], **options: Any) -> None:
        for like_it in shards:
            like_it.copy_(shard)

    def send(self, tensor: Tensor, **options: Any) -> None:
        self._sent[self.rank].append(tensor.clone())

    def recv(self, tensor: Tensor, *, group_src: int, **options: Any) -> None:
        tensor.copy_(self._sent[group_src].popleft())

    def failures(self, own: str | None, group: None) -> list[str]:
        """Nobody waits."""
        assert own is None, own
        return []


@pytest.fixture
def fake_distributed(monkeypatch: pytest.MonkeyPatch) -> FakeDistributed:
    fake = FakeDistributed()
    monkeypatch.setattr(export, "dist", fake)
    monkeypatch.setattr(export, "failures", fake.failures)
    monkeypatch.setattr(export.platforms, "world_group", lambda: None)
    return fake


def model_directory(directory: Path, num_experts: int) -> Path:
    """A config.json alone: of 3 x NUM_LAYERS x `num_experts` tensors and a few."""
    config = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        **dict(vocab_size=64, hidden_size=8, num_hidden_layers=NUM_LAYERS, num_attention_heads=2),
        **dict(num_key_value_heads=1, head_dim=4, num_experts=num_experts, num_experts_per_tok=2),
        **dict(moe_intermediate_size=2, norm_topk_prob=True, tie_word_embeddings=False),
    )
    config.save_pretrained(directory)
    return directory


def export_from(
    spec: ModelSpec, target: Path, fake: FakeDistributed, *, tp: int = 1, max_file_bytes: int = 1 << 30, **given: Any
) -> list[FakeActor]:
    actors = []
    for fake.rank in (1, 0):
        actors.append(FakeActor(spec, fake.rank, tp))
        export_huggingface(actors[-1], target, max_file_bytes=max_file_bytes, **given)
    return actors


def test_a_rank_builds_its_table_of_weights_once(tmp_path: Path, fake_distributed: FakeDistributed) -> None:
    spec = read_spec(model_directory(tmp_path / "source", 16))
    actors = export_from(spec, tmp_path / "out", fake_distributed, max_file_bytes=4096)
    assert [actor.asked for actor in actors] == [1, 1]
    files = SafetensorsDirectory(tmp_path / "out")
    assert len(files.tensors) == NUM_LAYERS * (3 * 16 + 9) + 3
    table = {weight.megatron: weight for weight, _ in staged_weights(spec, "lm", [range(NUM_LAYERS)])}
    experts = values_of(table["decoder.layers.1.mlp.experts.linear_fc1.weight"], spec, tp=1)
    name = "model.layers.1.mlp.experts.13.{}_proj.weight"
    assert torch.equal(files.read(name.format("gate"), (2, 8)), experts[13, :2])
    assert torch.equal(files.read(name.format("up"), (2, 8)), experts[13, 2:])


def test_an_export_has_the_record_of_its_own_run(tmp_path: Path, fake_distributed: FakeDistributed) -> None:
    source = model_directory(tmp_path / "source", 16)
    (source / "rendering.json").write_text('{"rows": "texts"}')
    spec = read_spec(source)
    for record, files in (({}, []), ({"rows": "conversations"}, ["rendering.json"])):
        export_from(spec, tmp_path / "out", fake_distributed, rendering=record)
        assert [file.name for file in (tmp_path / "out").glob("rendering.json")] == files
    assert json.loads((tmp_path / "out" / "rendering.json").read_text()) == record


# ------------------------------------------------------------------------------------------------ operations


def operations(work: Callable[[], object]) -> int:
    """How many bytecode instructions of hybridflow's own functions ran, with nothing remembered from before."""
    for remembering in (parts._blocks, shards.training_shard, weights._weights_of_layers):
        remembering.cache_clear()
    count, ours = 0, dict[CodeType, bool]()

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal count
        code = frame.f_code
        if code not in ours:
            ours[code] = code.co_filename.startswith(PACKAGE)
        if not ours[code]:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 tells no opcodes unless a frame asked before settrace
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def check_linear(counts: list[int]) -> None:
    """SIZES double: so does what is done for one more expert, but for what is done anyway."""
    first, second = counts[1] - counts[0], counts[2] - counts[1]
    assert 1.9 < second / first < 2.1, counts


def test_operations_of_an_export_are_linear_in_its_tensors(tmp_path: Path, fake_distributed: FakeDistributed) -> None:
    counts = []
    for size in SIZES:
        spec = read_spec(model_directory(tmp_path / f"{size}", size))
        target = tmp_path / f"{size}-out"
        counts.append(operations(lambda spec=spec, target=target: export_from(spec, target, fake_distributed, tp=2)))
    check_linear(counts)


@pytest.mark.parametrize("kind", ["huggingface", "converted"])
def test_operations_of_loading_are_linear_in_the_tensors(
    kind: str, tmp_path: Path, fake_distributed: FakeDistributed
) -> None:
    counts = []
    for size in SIZES:
        spec = read_spec(model_directory(tmp_path / f"{size}", size))
        path = tmp_path / f"{size}-out"
        export_from(spec, path, fake_distributed)
        if kind == "converted":
            to_megatron(path, tmp_path / f"{size}-converted")
            path = tmp_path / f"{size}-converted"
        counts.append(operations(lambda path=path, spec=spec: read_all(path, spec)))
    check_linear(counts)


def read_all(path: Path, spec: ModelSpec) -> None:
    files = open_checkpoint(path, dataclasses.replace(spec, path=path))
    for weight, _ in staged_weights(spec, "lm", [range(spec.num_layers)]):
        read = read_shard(files, weight, spec, Place(2, 1))
        assert read.shape == shard_shape(weight, spec, Cut(2, 2))
