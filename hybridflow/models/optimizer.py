"""megatron's data-parallel wrapper and optimizer over a model, and the learning-rate schedule."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup, _ParamAndGradBuffer
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.typed_torch import not_none
from torch import Tensor

from hybridflow.config import OptimizerConfig
from hybridflow.models import optimizer_state
from hybridflow.models.build import PackedModel
from hybridflow.models.memory import HostMemory, Offloaded, Released, live_bytes, storages
from hybridflow.models.optimizer_state import OwnedState, moments_of
from hybridflow.models.staged_step import StagedStep
from hybridflow.parallel.grid import Grid
from hybridflow.parallel.platform import adapt_megatron, fuse_weight_gradients, gathers_within


class BucketedDataParallel(DistributedDataParallel):
    """megatron's data-parallel wrapper with the bucket size we ask for; None: megatron's own.

    megatron 0.16.1 puts everything into one bucket unless gradients are reduced during the backward pass (`overlap`).
    We need several, because a bucket's parameters live in one storage, and a reshard releases them storage by storage.

    With `overlap` and ZeRO-1 parameters are gathered too while others are computed with: a step starts all gathers, and
    a layer's forward pass waits for the layer's gather. Whoever else reads weights calls `wait_for_parameters` before.
    """

    def __init__(
        self, model: PackedModel, grid: Grid, *, zero1: bool, bucket_elements: int | None, overlap: bool
    ) -> None:
        self.__dict__["_bucket_elements"] = bucket_elements
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=zero1,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap and zero1,
        )
        super().__init__(model.config, config, model, pg_collection=grid.groups)
        fuse_weight_gradients(model)
        if bucket_elements is not None:
            for buffer in self.flat_buffers():
                _split_storage(buffer)
        if config.overlap_param_gather:
            self._wait_by_layer(model)

    def _wait_by_layer(self, model: PackedModel) -> None:
        """In place of megatron's hooks, which know of a weight only where the weight's module is called."""
        self.disable_forward_pre_hook(param_sync=False)
        layers = [*model.decoder.layers]
        of_layers = {parameter for layer in layers for parameter in layer.parameters()}
        others = [parameter for parameter in model.parameters() if parameter not in of_layers]
        for module, parameters in [(model, others), *((layer, [*layer.parameters()]) for layer in layers)]:
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            groups = list(dict.fromkeys(self.param_to_bucket_group[parameter] for parameter in trained))
            module.register_forward_pre_hook(lambda module, arguments, groups=groups: _wait(groups))

    def gather_parameters(self) -> None:
        """Start all gathers where they overlap, in the order in which a forward pass waits for them."""
        if self.ddp_config.overlap_param_gather:
            for group in reversed(self._groups()):
                group.start_param_sync()

    def gather_at_once(self) -> None:
        """Gather what replicas have stepped, where that does not overlap: the end of a step of megatron's optimizer."""
        if self.ddp_config.use_distributed_optimizer and not self.ddp_config.overlap_param_gather:
            self.start_param_sync()

    def wait_for_parameters(self) -> None:
        _wait(self._groups())

    def _groups(self) -> list[_ParamAndGradBucketGroup]:
        return [*self.bucket_groups, *self.expert_parallel_bucket_groups]

    @property
    def bucket_size(self) -> int | None:
        elements: int | None = self.__dict__["_bucket_elements"]
        return elements

    @bucket_size.setter
    def bucket_size(self, value: int | None) -> None:
        """What megatron would have it be."""
        if self.__dict__["_bucket_elements"] is None:
            self.__dict__["_bucket_elements"] = value

    def flat_buffers(self) -> list[_ParamAndGradBuffer]:
        """megatron's `buffers`, which hide torch's method of that name, and those of experts that replicas share."""
        found: list[_ParamAndGradBuffer] = self.__dict__["buffers"]
        return [*found, *self.expert_parallel_buffers]


def _wait(groups: Iterable[_ParamAndGradBucketGroup]) -> None:
    for group in groups:
        handle: Any = group.param_gather_handle  # megatron's class says that it is None for ever
        if handle is not None:
            handle.wait()
            group.param_gather_handle = None


def _split_storage(buffer: _ParamAndGradBuffer) -> None:
    """Give each bucket a separate storage for the bucket's parameters, before the optimizer takes views of them.

    Until the last bucket has a storage, the weights are there twice, as they are when megatron fills the buffer.
    """
    if buffer.param_data is None:  # without ZeRO-1 each parameter has a storage
        return
    for bucket in buffer.buckets:
        bucket.param_data = not_none(bucket.param_data).clone()
        for parameter in bucket.params_list:
            start, stop, _ = buffer.param_index_map[parameter]
            flat = bucket.param_data[start - bucket.offset : stop - bucket.offset]
            parameter.data = flat.view(parameter.shape)
    buffer.param_data = None  # nothing else reads it but megatron's own offloading


NO_BYTES = {"weights": 0, "gradients": 0, "optimizer": 0}


class TrainedModel:
    """Model chunks with float32 gradients and main weights; with ZeRO-1 the optimizer state is split over replicas.

    staged: whether the state lies in host memory, see `StagedStep`.
    """

    def __init__(
        self,
        chunks: list[PackedModel],
        grid: Grid,
        config: OptimizerConfig,
        *,
        bucket_bytes: int | None,
        overlap: bool,
        staged: bool = False,
    ) -> None:
        adapt_megatron()
        self.zero1 = config.zero1 and config.name == "adam"  # megatron's distributed optimizer knows no other
        dtype = chunks[0].config.params_dtype
        self.config = config
        bucket_elements = None if bucket_bytes is None else bucket_bytes // dtype.itemsize
        overlap = overlap and grid.layout.copies("dense") > 1
        self.chunks = [
            BucketedDataParallel(chunk, grid, zero1=self.zero1, bucket_elements=bucket_elements, overlap=overlap)
            for chunk in chunks
        ]
        chunks_of_megatron: list[MegatronModule] = [*self.chunks]
        with gathers_within(grid.groups.intra_dist_opt):
            optimizer = get_megatron_optimizer(
                _megatron_config(config, dtype, zero1=self.zero1),
                chunks_of_megatron,
                use_gloo_process_groups=False,
                pg_collection=grid.groups,
            )
        assert isinstance(optimizer, ChainedOptimizer), f"megatron chains its optimizers, this is {type(optimizer)}"
        self.optimizer = optimizer
        for part in optimizer.chained_optimizers:
            fuse_adam(part.optimizer)
        self._parts = [part for part in optimizer.chained_optimizers if part.optimizer is not None]
        self._staged = StagedStep(self._parts, moments_of(config)) if staged else None
        self._host = HostMemory()

    def zero_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self, lr: float) -> float:
        """One optimizer step; the gradient norm before clipping, alike on all ranks of the grid.

        Where it is not finite no step is taken: weights and optimizer state stay as they are.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.config.weight_decay * group.get("wd_mult", 1.0)
        found_inf = self.optimizer.prepare_grads()
        assert not found_inf, "megatron looks for infinite gradients with loss scaling alone"
        norm = float(self.optimizer.get_grad_norm())
        if math.isfinite(norm):
            self._clip(norm)
            if self._staged is None:
                self.optimizer.step_with_ready_grads()
            else:
                self._staged.step()
                for chunk in self.chunks:
                    chunk.gather_at_once()
            for chunk in self.chunks:
                chunk.gather_parameters()
        return norm

    def wait_for_parameters(self) -> None:
        """Until the last step's weights are there whole, before they are read other than by a forward pass."""
        for chunk in self.chunks:
            chunk.wait_for_parameters()

    def _clip(self, norm: float) -> None:
        if self.config.clip_grad == 0:
            return
        for part in self.optimizer.chained_optimizers:
            parameters: list[Tensor] = [] if getattr(part, "is_stub_optimizer", False) else [*part.get_parameters()]
            if parameters:
                clip_grad_by_total_norm_fp32(parameters, self.config.clip_grad, norm)

    @contextlib.contextmanager
    def offloaded(self, *, gradients: bool, optimizer: bool) -> Iterator[None]:
        """Within the block gradients are released (zero after it) and the optimizer state waits in host memory.

        Where a step is staged, the state does so anyway.
        """
        held: list[Released | Offloaded] = []
        if gradients:
            held.append(Released(self._gradients()))
        if optimizer:
            held.append(Offloaded(self._optimizer_state(), self._host))
        try:
            yield
        finally:
            for memory in held:
                memory.restore()

    def reserve_host_memory(self) -> None:
        """Take the host memory that the optimizer state will wait in, with what the first step adds to the state."""
        moments = len(moments_of(self.config))
        trained = [p for part in self._parts for group in part.optimizer.param_groups for p in group["params"]]
        more = sum(p.numel() * moments + 1 for p in trained) * torch.float32.itemsize  # and a count of steps each
        self._host.reserve(live_bytes(self._optimizer_state()) + more)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes this rank holds: weights, gradients, optimizer state with float32 main weights."""
        return {
            "weights": live_bytes(self._weights()),
            "gradients": live_bytes(self._gradients()),
            "optimizer": live_bytes(self._optimizer_state()),
        }

    def host_bytes(self) -> int:
        """Bytes of host memory that this rank keeps for the optimizer state."""
        blocks = self._host.blocks if self._staged is None else self._staged.blocks
        return sum(block.nbytes for block in blocks)

    def owned_states(self) -> Iterator[OwnedState]:
        """See `optimizer_state`."""
        if self._staged is not None:
            return self._staged.owned_states()
        return optimizer_state.owned_states(self._parts, moments_of(self.config))

    def num_steps(self) -> int:
        """See `optimizer_state`."""
        return optimizer_state.num_steps(self._parts) if self._staged is None else self._staged.num_steps()

    def set_num_steps(self, steps: int) -> None:
        """See `optimizer_state`."""
        if self._staged is not None:
            self._staged.set_num_steps(steps)
        else:
            optimizer_state.set_num_steps(self._parts, steps)

    def _weights(self) -> list[Tensor]:
        return [parameter.data for chunk in self.chunks for parameter in chunk.parameters()]

    def _gradients(self) -> list[Tensor]:
        return [buffer.grad_data for chunk in self.chunks for buffer in chunk.flat_buffers()]

    def _optimizer_state(self) -> list[Tensor]:
        """Moments and main weights, without those that are views of the weights (float32 models have no other)."""
        optimizers = [part.optimizer for part in self._parts]
        moments = [x for optimizer in optimizers for s in optimizer.state.values() for x in s.values()]
        mains = [p.data for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        known = {storage.data_ptr() for storage in storages(self._weights())}
        tensors = [x for x in moments if isinstance(x, Tensor)] + mains
        return [x for x in tensors if x.untyped_storage().data_ptr() not in known]


def fuse_adam(optimizer: torch.optim.Optimizer | None) -> None:
    """Let torch's Adam update in one kernel; megatron takes it where there is neither Transformer Engine's nor apex's.

    Otherwise it makes temporaries as large as all it updates on a GPU, and passes over all of it again and again on a
    CPU. megatron 0.16.1 has no setting for that; torch reads it from the group at each step, and keeps the count of
    steps on the device.
    """
    if isinstance(optimizer, torch.optim.Adam):
        assert not optimizer.state, "the steps were counted elsewhere"
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = True, False


def _megatron_config(config: OptimizerConfig, dtype: torch.dtype, *, zero1: bool) -> MegatronOptimizerConfig:
    return MegatronOptimizerConfig(
        optimizer=config.name,
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        sgd_momentum=config.momentum,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=zero1,
    )


def learning_rate(config: OptimizerConfig, iteration: int, num_iterations: int) -> float:
    """The rate of iteration 1 .. num_iterations: linear warm-up to `lr`, then constant, or falling to `min_lr`."""
    if iteration <= config.warmup_iterations:
        return config.lr * iteration / config.warmup_iterations
    done = (iteration - 1 - config.warmup_iterations) / max(1, num_iterations - 1 - config.warmup_iterations)
    falling = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
    share = falling[config.schedule]
    return config.lr if config.schedule == "constant" else config.min_lr + (config.lr - config.min_lr) * share
