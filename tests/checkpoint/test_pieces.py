"""Shares of weights as boxes of what is stored, against the indices of the whole's elements."""

import pytest
import torch
from torch import Tensor

from hybridflow.architecture.parts import matrix_of
from hybridflow.architecture.shards import training_shard
from hybridflow.architecture.spec import ModelSpec, read_spec
from hybridflow.architecture.weight import Weight
from hybridflow.architecture.weights import model_weights
from hybridflow.checkpoint.share_chunks import ShareChunk, pieces, stored_shape
from hybridflow.parallel.layout import Cut, Place
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


def share(weight: Weight, spec: ModelSpec, place: Place) -> Tensor:
    """What a rank holds, flattened as in its memory."""
    shard = training_shard(matrix_of(weight, spec), place)
    rows = torch.cat([whole(weight, spec)[slice(*interval)] for interval in shard.rows])
    return rows[:, slice(*shard.columns)].reshape(-1)


@pytest.mark.parametrize(
    "cut_of_ranks", [Cut(), Cut(2, 2), Cut(4, 4), Cut(2, 1, 2), Cut(4, 2, 2), Cut(1, 1, 4)], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_element_is_where_its_index_says(family: str, cut_of_ranks: Cut, specs: dict) -> None:
    spec, chance = specs[family], torch.Generator().manual_seed(0)
    for weight in model_weights(spec, "lm"):
        stored = torch.arange(torch.Size(stored_shape(weight, spec)).numel()).view(stored_shape(weight, spec))
        for place in cut_of_ranks.places(weight.group):
            own = share(weight, spec, place)
            cut = int(torch.randint(len(own) + 1, (), generator=chance))
            for run in ((0, len(own)), (0, cut), (cut, len(own)), (cut // 2, cut)):
                found = torch.full((run[1] - run[0],), -1)
                for piece in pieces(weight, spec, place, run=run):
                    places = found.as_strided(piece.shape, piece.strides, piece.start)
                    assert places.eq(-1).all(), "two boxes have one element"
                    places.copy_(stored[_leading(piece)][_box(piece)])
                assert found.equal(own[run[0] : run[1]]), (weight.megatron, place, run)


def _leading(piece: ShareChunk) -> tuple[int, ...]:
    return piece.offset[: len(piece.offset) - len(piece.shape)]


def _box(piece: ShareChunk) -> tuple[slice, ...]:
    ends = piece.offset[len(piece.offset) - len(piece.shape) :]
    return tuple(slice(start, start + size) for start, size in zip(ends, piece.shape, strict=True))


def test_a_run_of_a_matrix_is_three_boxes_at_most(specs: dict) -> None:
    """Elements 10 .. 300 of rows of 64: the end of row 0, rows 1 to 3, the beginning of row 4. Layer 1 of two."""
    spec = specs["llama"]
    name = "decoder.layers.1.self_attention.linear_proj.weight"
    weight = next(weight for weight in model_weights(spec, "lm") if weight.megatron == name)
    assert stored_shape(weight, spec) == (2, 64, 64)
    assert list(pieces(weight, spec, Place(1, 0), run=(10, 300))) == [
        ShareChunk(0, (1, 54), (64, 1), (1, 0, 10)),
        ShareChunk(54, (3, 64), (64, 1), (1, 1, 0)),
        ShareChunk(246, (1, 44), (64, 1), (1, 4, 0)),
    ]
    # with half of the columns, rows of 32: elements 10 .. 70 are in rows 0, 1 and 2
    assert list(pieces(weight, spec, Place(2, 1), run=(10, 70))) == [
        ShareChunk(0, (1, 22), (32, 1), (1, 0, 42)),
        ShareChunk(22, (1, 32), (32, 1), (1, 1, 32)),
        ShareChunk(54, (1, 6), (32, 1), (1, 2, 32)),
    ]


def test_whole_experts_are_one_box_for_each_run_of_rows(specs: dict) -> None:
    """4 experts of gate and up, 2 x 32 rows of 64; tp rank 1 of 2 has 16 rows of each, 2048 elements of an expert."""
    spec = specs["qwen3_moe"]
    found = {weight.megatron: weight for weight in model_weights(spec, "lm")}
    fc1 = found["decoder.layers.1.mlp.experts.linear_fc1.weight"]
    assert stored_shape(fc1, spec) == (2, 4, 64, 64)
    assert list(pieces(fc1, spec, Place(2, 1), run=(0, 4 * 2048))) == [
        ShareChunk(0, (4, 16, 64), (2048, 64, 1), (1, 0, 16, 0)),
        ShareChunk(1024, (4, 16, 64), (2048, 64, 1), (1, 0, 48, 0)),
    ]
    # from row 15 of expert 0's gate on, and of expert 3 two rows and an element
    assert list(pieces(fc1, spec, Place(2, 1), run=(15 * 64, 3 * 2048 + 2 * 64 + 1))) == [
        ShareChunk(0, (1, 1, 64), (2048, 64, 1), (1, 0, 31, 0)),
        ShareChunk(64, (1, 16, 64), (2048, 64, 1), (1, 0, 48, 0)),
        ShareChunk(17 * 64, (2, 16, 64), (2048, 64, 1), (1, 1, 16, 0)),
        ShareChunk(33 * 64, (2, 16, 64), (2048, 64, 1), (1, 1, 48, 0)),
        ShareChunk(17 * 64 + 2 * 2048, (1, 2, 64), (2048, 64, 1), (1, 3, 16, 0)),
        ShareChunk(19 * 64 + 2 * 2048, (1, 1, 1), (2048, 64, 1), (1, 3, 18, 0)),
    ]
    fc2 = found["decoder.layers.1.mlp.experts.linear_fc2.weight"]
    assert list(pieces(fc2, spec, Place(2, 1), run=(0, 4 * 64 * 16))) == [
        ShareChunk(0, (4, 64, 16), (64 * 16, 16, 1), (1, 0, 0, 16))
    ]
