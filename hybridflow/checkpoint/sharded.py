"""A role as a torch_dist checkpoint of megatron-core: its weights and, of one that is trained, its optimizer.

megatron's dist_checkpointing describes and checks what a rank has, and writes what is common. The tensors are written
and read by strategies of ours: by boxes of the whole parameters, so that any layout reads what any other wrote, without
a gather on either side; by each rank its own file, when and where the caller wants; nothing that is not needed is read.
Of what several ranks hold alike, data-parallel replicas share the writing.

    decoder.layers.mlp.linear_fc1.weight                              as tools.convert writes and reads it
    optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight      one for each name of `optimizer_state.state_names`
    optimizer.num_steps
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.serialization import load as load_sharded
from megatron.core.dist_checkpointing.serialization import save as save_sharded
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy, LoadShardedStrategy
from megatron.core.typed_torch import not_none
from torch import Tensor

from hybridflow.architecture.shards import Interval, Split
from hybridflow.architecture.weight_files import extra_states
from hybridflow.architecture.weights import Shape, Weight, embedding, stored_at
from hybridflow.batch import balanced_partition
from hybridflow.checkpoint.share_chunks import ShareChunk, pieces, stored_shape
from hybridflow.errors import CheckpointError
from hybridflow.formats.distributed_directory import BACKEND, DistributedDirectory
from hybridflow.formats.distributed_metadata import METADATA
from hybridflow.formats.distributed_storage import Chunk, ChunkRecord, write_metadata
from hybridflow.formats.safetensors_files import TensorInfo
from hybridflow.models.named_weights import named_weights
from hybridflow.models.optimizer_state import num_steps, owned_states, set_num_steps
from hybridflow.roles.base import TrainedRole
from hybridflow.roles.policy import Reference

SavedRole = TrainedRole | Reference
STEPS = "optimizer.num_steps"
NEW_MOMENTUM = "optimizer.state.momentum_buffer."  # SGD that had none so far begins with zeros, as it would at first


@dataclass(frozen=True)
class ToWrite:
    """What this rank writes of a role."""

    chunks: tuple[Chunk, ...]
    empty: tuple[str, ...]  # keys of objects without content that megatron's layers look for

    @property
    def num_bytes(self) -> int:
        return sum(chunk.num_bytes for chunk in self.chunks)


def prepare_save(role: SavedRole, directory: Path) -> ToWrite:
    """What this rank has to write into `directory`, which is there; rank 0 has written what is common.

    The chunks read the role's memory when they are written: until then it must not change. Not collective: megatron
    finishes an asynchronous save later, and would check on every rank what `write_metadata` checks on one.
    """
    strategy = _Collect()
    save_sharded(_sharded(role), str(directory), strategy, validate_access_integrity=False, async_sharded_save=True)
    chunks = tuple(map(chunk_of, strategy.tensors))
    return ToWrite(chunks, tuple(key for chunk in chunks for key in extra_states(chunk)))


def finish_save(directory: Path, records: Iterable[ChunkRecord]) -> None:
    """On one rank, once every rank has written its records: what says where they lie, and of what kind this is.

    Errors: ValueError unless they cover every tensor once.
    """
    write_metadata(directory, records)
    save_config(CheckpointingConfig(BACKEND, 1), str(directory))


def load(role: SavedRole, files: DistributedDirectory) -> None:
    """Fill the role's weights, and optimizer state if it has any, from a checkpoint of any layout. Not collective.

    Errors: CheckpointError, naming file and tensor, where one is missing, damaged, or of another shape or dtype.
    """
    if not role.chunks:
        return
    tree = _sharded(role)
    with torch.no_grad():
        load_sharded(tree, str(files.path), _ReadBoxes(files), validate_access_integrity=False)
    if isinstance(role, TrainedRole):
        set_num_steps(not_none(role.training_model), int(not_none(tree[STEPS].data)))


# ------------------------------------------------------------------------------------------------- what a rank has


def _sharded(role: SavedRole) -> dict[str, Any]:
    """The tensors of a role that this rank holds: megatron's sharded state dict. Nothing outside the role's grid."""
    trained, grid = role.training_model if isinstance(role, TrainedRole) else None, role.grid
    if not role.chunks:
        return {}
    if trained is not None:
        trained.wait_for_parameters()
    weights = list(named_weights(role.chunks, role.spec, head=role.head))
    own = balanced_partition([parameter.numel() for _, parameter in weights], grid.dp)[grid.dp_rank]
    states = {} if trained is None else {id(state.parameter): state for state in owned_states(trained)}
    is_first = grid.tp_rank == grid.pp_rank == grid.dp_rank == 0
    tree: dict[str, Any] = {} if trained is None else {STEPS: _steps(num_steps(trained), written=is_first)}
    for i, (weight, parameter) in enumerate(weights):
        (key, _), first_copy = stored_at(weight), _is_first_copy(weight, role)
        whole, flat = (0, parameter.numel()), parameter.data.view(-1)
        tree[weight.megatron] = _boxes(role, weight, key, whole, flat, written=first_copy and i in own)
        state = states.get(id(parameter))
        if state is None or trained is None:
            continue
        for name, tensor in state.tensors.items():
            written, run = first_copy and (trained.zero1 or i in own), (state.start, state.stop)
            state_key = f"optimizer.state.{name}.{key}"
            tree[f"{name} of {weight.megatron}"] = _boxes(role, weight, state_key, run, tensor, written=written)
    return tree


def _is_first_copy(weight: Weight, role: SavedRole) -> bool:
    """Whether no rank of a lower tensor-parallel or pipeline coordinate holds the same elements."""
    grid = role.grid
    again_at_the_end = weight == embedding(role.spec) and not grid.is_first_stage  # tied
    return not again_at_the_end and (weight.split is not Split.REPLICATED or grid.tp_rank == 0)


def _boxes(
    role: SavedRole, weight: Weight, key: str, run: Interval, flat: Tensor, *, written: bool
) -> list[ShardedTensor]:
    """`flat`, which are elements run[0] .. run[1] of this rank's share of the weight, as boxes of the tensor `key`."""
    found = pieces(weight, role.spec, tp=role.grid.tp, tp_rank=role.grid.tp_rank, run=run)
    return [sharded_box(key, stored_shape(weight, role.spec), piece, flat, written=written) for piece in found]


def sharded_box(key: str, whole: Shape, piece: ShareChunk, flat: Tensor, *, written: bool) -> ShardedTensor:
    data = flat.as_strided(piece.shape, piece.strides, flat.storage_offset() + piece.start)
    return ShardedTensor(
        key,
        data,
        data.dtype,
        local_shape=piece.shape,
        global_shape=whole,
        global_offset=piece.offset,
        axis_fragmentations=None,  # boxes of any size
        replica_id=0 if written else 1,
        prepend_axis_num=len(whole) - len(piece.shape),
    )


def _steps(steps: int, *, written: bool) -> ShardedTensor:
    return sharded_box(
        STEPS, (1,), ShareChunk(0, (1,), (1,), (0,)), torch.tensor([steps], dtype=torch.float64), written=written
    )


# ------------------------------------------------------------------------------------------------- the strategies


class _Collect(AsyncSaveShardedStrategy):
    """Keeps what this rank has to write: megatron calls this once it has checked and written all else."""

    def __init__(self) -> None:
        super().__init__(BACKEND, 1)
        self.tensors: list[ShardedTensor] = []

    def async_save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> AsyncRequest:
        self.tensors = [x for x in nested_values(sharded_state_dict) if is_main_replica(x.replica_id)]
        return AsyncRequest(None, (), [])  # nobody waits for it

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True  # there are none


def chunk_of(tensor: ShardedTensor) -> Chunk:
    shape = (1,) * tensor.prepend_axis_num + tensor.local_shape
    data = not_none(tensor.data)
    return Chunk(
        tensor.key, tensor.global_offset, shape, tensor.global_shape, tensor.dtype, read=lambda: data.view(shape)
    )


class _ReadBoxes(LoadShardedStrategy):
    """Fills the memory that the sharded tensors have."""

    def __init__(self, files: DistributedDirectory) -> None:
        super().__init__()
        self._files = files

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> dict[str, Any]:
        for tensor in nested_values(sharded_state_dict):
            self._read(tensor)
        return {}

    def _read(self, tensor: ShardedTensor) -> None:
        files, key, data = self._files, tensor.key, not_none(tensor.data)
        wanted = TensorInfo(tensor.global_shape, tensor.dtype)
        if key not in files and key.startswith(NEW_MOMENTUM):
            data.zero_()
            return
        if key not in files:
            raise CheckpointError(f"{files.path / METADATA}: no tensor {key}")
        if files.tensors[key] != wanted:
            raise CheckpointError(f"{files.path / METADATA}: {key} is {files.tensors[key]}, the model has {wanted}")
        out = data if data.device.type == "cpu" else torch.empty(data.shape, dtype=data.dtype)
        files.read_into(key, tensor.global_offset, out[(None,) * tensor.prepend_axis_num])
        if out is not data:
            data.copy_(out)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> Any:
        raise NotImplementedError("it is asked for only where keys may be missing")

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """torch_dist: `DistributedDirectory` reads no other."""

    def check_version_compatibility(self, loaded_version: int) -> None:
        """There is one."""
