"""Shares of weights as boxes of what is stored, against the indices of the whole's elements."""

import pytest
import torch
from torch import Tensor

from hybridflow.architecture.parts import matrix_of
from hybridflow.architecture.shards import training_shard
from hybridflow.architecture.spec import ModelSpec, read_spec
from hybridflow.architecture.weights import Weight, model_weights
from hybridflow.checkpoint.pieces import Piece, pieces, stored_shape
from tests.tiny_models import make_checkpoints

FAMILIES = ("llama", "opt", "opt_350m", "qwen3_moe")


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSpec]:
    root = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        make_checkpoints(root / family, family=family, tied=False)
    return {family: read_spec(root / family / "policy") for family in FAMILIES}


def whole(weight: Weight, spec: ModelSpec) -> Tensor:
    """(rows, columns) of the whole parameter: each element is its index in the stored tensor."""
    matrix, layer = matrix_of(weight, spec), weight.layer or 0
    size = matrix.rows * matrix.columns
    return torch.arange(layer * size, (layer + 1) * size).view(matrix.rows, matrix.columns)


def share(weight: Weight, spec: ModelSpec, tp: int, tp_rank: int) -> Tensor:
    """What a rank holds, flattened as in its memory."""
    shard = training_shard(matrix_of(weight, spec), tp, tp_rank)
    rows = torch.cat([whole(weight, spec)[slice(*interval)] for interval in shard.rows])
    return rows[:, slice(*shard.columns)].reshape(-1)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_element_is_where_its_index_says(family: str, tp: int, specs: dict) -> None:
    spec, chance = specs[family], torch.Generator().manual_seed(0)
    for weight in model_weights(spec, "lm"):
        stored = torch.arange(torch.Size(stored_shape(weight, spec)).numel()).view(stored_shape(weight, spec))
        for tp_rank in range(tp):
            own = share(weight, spec, tp, tp_rank)
            cut = int(torch.randint(len(own) + 1, (), generator=chance))
            for run in ((0, len(own)), (0, cut), (cut, len(own)), (cut // 2, cut)):
                found = torch.full((run[1] - run[0],), -1)
                for piece in pieces(weight, spec, tp=tp, tp_rank=tp_rank, run=run):
                    box = stored[_leading(piece)][_box(piece)]
                    found[piece.start : piece.start + box.numel()] = box.reshape(-1)
                assert found.equal(own[run[0] : run[1]]), (weight.megatron, tp_rank, run)


def _leading(piece: Piece) -> tuple[int, ...]:
    return piece.offset[: len(piece.offset) - len(piece.shape)]


def _box(piece: Piece) -> tuple[slice, ...]:
    ends = piece.offset[len(piece.offset) - len(piece.shape) :]
    return tuple(slice(start, start + size) for start, size in zip(ends, piece.shape, strict=True))


def test_a_run_of_a_matrix_is_three_boxes_at_most(specs: dict) -> None:
    """Elements 10 .. 300 of rows of 64: the end of row 0, rows 1 to 3, the beginning of row 4. Layer 1 of two."""
    spec = specs["llama"]
    name = "decoder.layers.1.self_attention.linear_proj.weight"
    weight = next(weight for weight in model_weights(spec, "lm") if weight.megatron == name)
    assert stored_shape(weight, spec) == (2, 64, 64)
    assert list(pieces(weight, spec, tp=1, tp_rank=0, run=(10, 300))) == [
        Piece(0, (1, 54), (1, 0, 10)),
        Piece(54, (3, 64), (1, 1, 0)),
        Piece(246, (1, 44), (1, 4, 0)),
    ]
    # with half of the columns, rows of 32: elements 10 .. 70 are in rows 0, 1 and 2
    assert list(pieces(weight, spec, tp=2, tp_rank=1, run=(10, 70))) == [
        Piece(0, (1, 22), (1, 0, 42)),
        Piece(22, (1, 32), (1, 1, 32)),
        Piece(54, (1, 6), (1, 2, 32)),
    ]
