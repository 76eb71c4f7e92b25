"""megatron's data-parallel wrapper and optimizer over a model, and the learning-rate schedule."""

import math

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

from hybridflow.config import OptimizerConfig
from hybridflow.models.build import PackedModel
from hybridflow.parallel.grid import Grid
from hybridflow.parallel.platform import adapt_megatron


class TrainedModel:
    """A model with float32 gradients and main weights; with ZeRO-1 its optimizer state is split over replicas."""

    def __init__(self, model: PackedModel, grid: Grid, config: OptimizerConfig) -> None:
        adapt_megatron()
        zero1 = config.zero1 and config.name == "adam"  # megatron's distributed optimizer knows no other
        self._config = config
        self.ddp = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=zero1),
            model,
            pg_collection=grid.groups,
        )
        self.optimizer: MegatronOptimizer = get_megatron_optimizer(
            _megatron_config(config, model.config.params_dtype, zero1=zero1),
            [self.ddp],
            use_gloo_process_groups=False,
            pg_collection=grid.groups,
        )

    def zero_gradients(self) -> None:
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self, lr: float) -> Tensor:
        """One optimizer step; the gradient norm before clipping, 0-d float32."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = self._config.weight_decay * group.get("wd_mult", 1.0)
        stepped, grad_norm, _ = self.optimizer.step()
        assert stepped, "the optimizer skipped a step without loss scaling"
        return torch.as_tensor(grad_norm, dtype=torch.float32)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes this rank holds: weights, gradients, optimizer state with float32 main weights."""
        weights = _storage_bytes([p.data for p in self.ddp.parameters()])
        gradients = sum(buffer.grad_data.nbytes for buffer in self.ddp.buffers)
        state = [x for group in self._torch_optimizers() for s in group.state.values() for x in s.values()]
        mains = [p for group in self._torch_optimizers() for g in group.param_groups for p in g["params"]]
        known = {p.data.untyped_storage().data_ptr() for p in self.ddp.parameters()}
        own = [p for p in mains if p.untyped_storage().data_ptr() not in known]
        return {
            "weights": weights,
            "gradients": gradients,
            "optimizer": _storage_bytes([x for x in state if isinstance(x, Tensor)] + own),
        }

    def _torch_optimizers(self) -> list[torch.optim.Optimizer]:
        chained = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [part.optimizer for part in chained if part.optimizer is not None]


def _storage_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


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
