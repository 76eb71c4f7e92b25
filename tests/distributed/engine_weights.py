"""What an engine must hold and compute, to the bit: shards of whole HuggingFace tensors, and vLLM's own loader."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.checkpoint.export import export_huggingface
from hybridflow.config.length_buckets import always
from hybridflow.cpu.engine import decoder, decoding, patches
from hybridflow.roles.policy import Actor
from hybridflow.rollout.engine import RolloutEngine
from hybridflow.rollout.language_model import LanguageModel
from hybridflow.trainers.online import OnlineTrainer
from tests.distributed.gather import whole

PADDING = 100.0  # of the vocabulary: what would win if it were looked at


class EngineShards:
    """A rank's parameters of a Llama's or Qwen's engine: rows are copied, columns are strided views."""

    def __init__(self, tensors: Mapping[str, Tensor], num_kv_heads: int, tp_rank: int, tp: int) -> None:
        self._tensors, self._num_kv_heads, self._tp_rank, self._tp = tensors, num_kv_heads, tp_rank, tp

    def __call__(self, name: str) -> Tensor:
        prefix, _, leaf = name.rpartition(".")
        parent, _, module = prefix.rpartition(".")
        if module == "qkv_proj":
            kv_parts = min(self._tp, self._num_kv_heads)  # beyond that, ranks share a head
            parts = {"q_proj": self._tp, "k_proj": kv_parts, "v_proj": kv_parts}
            return torch.cat([self._rows(f"{parent}.{part}.{leaf}", of) for part, of in parts.items()])
        if module == "gate_up_proj":
            return torch.cat([self._rows(f"{parent}.{part}_proj.{leaf}", self._tp) for part in ("gate", "up")])
        if module in ("o_proj", "down_proj"):
            return self._tensors[name].chunk(self._tp, dim=1)[self._tp_rank]
        if module in ("embed_tokens", "lm_head"):
            return self._vocabulary(self._tensors[name])
        return self._tensors[name]

    def _rows(self, name: str, parts: int) -> Tensor:
        return self._tensors[name].chunk(parts)[self._tp_rank * parts // self._tp]

    def _vocabulary(self, whole: Tensor) -> Tensor:
        padding = whole.new_full((-len(whole) % 64, whole.shape[1]), PADDING)
        return torch.cat([whole, padding]).chunk(self._tp)[self._tp_rank]


def wrong_parameters(trainer: OnlineTrainer) -> list[str]:
    """Ranks and names of the engines' parameters that are not the actor's weights, bit by bit, after a hand-off.

    Of a model whose embeddings are not tied. Collective over the world.
    """
    actor, world = trainer.roles.actor, dist.group.WORLD
    _wait_for_gathers(actor)
    box = [whole(actor, lambda p: p.data)]  # of float32, exact
    dist.broadcast_object_list(box, src=actor.grid.layout.ranks[0], group=world)
    with trainer.source.engine.awake():
        own = _wrong_parameters(trainer, box[0]) if trainer.generator.engine is not None else []
    everyone: list[list[str]] = [[]] * trainer.platform.world_size
    dist.all_gather_object(everyone, own, group=world)
    return [f"rank {rank}: {name}" for rank, names in enumerate(everyone) for name in names]


def _wait_for_gathers(actor: Actor) -> None:
    """Wait for the gathers of the last step, and leave their handles for the hand-off, which must wait by itself."""
    for chunk in actor.training_model.chunks if actor.training_model is not None else []:
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            if group.param_gather_handle is not None:
                group.param_gather_handle.wait()


def _wrong_parameters(trainer: OnlineTrainer, tensors: dict[str, Tensor]) -> list[str]:
    layout, found = trainer.generator.layout, trainer.generator.engine.parameters()
    tp_rank = layout.coordinates(trainer.platform.rank).tp
    expected = EngineShards(tensors, trainer.roles.actor.spec.num_kv_heads, tp_rank, layout.tp)
    assert found
    return [name for name, parameter in found.items() if not _same(parameter.float(), expected(name))]


def _same(found: Tensor, expected: Tensor) -> bool:
    """Rows of padding are nobody's."""
    used = expected.ne(PADDING)
    return found.shape == expected.shape and torch.equal(found[used], expected[used])


def differs_from_export(trainer: OnlineTrainer, directory: Path) -> list[str]:
    """What of sampled and greedy responses is not equal, bit by bit, when vLLM itself has loaded the exported actor.

    Collective over the world. The trainer's engine is asked for the last time: its place is the other's.
    """
    export_huggingface(trainer.roles.actor, directory)
    generator = trainer.generator
    with trainer.source.engine.awake():
        expected = _responses(trainer)
    if generator.engine is not None:
        generator.engine.close()
        placed = trainer.placed
        with vllms_own_loader():
            generator.engine = RolloutEngine(
                directory,
                _no_source,
                dtype=placed.config.actor.dtype,
                language_model=LanguageModel.of(trainer.roles.actor.spec),
                layout=placed.rollout,
                stages=placed.stages,
                max_length=placed.config.max_sequence_length,
                sampling=placed.config.sampling,
                config=placed.config.rollout,
                kv_cache_bytes=placed.kv_cache.of_stage(
                    placed.stages, placed.rollout.coordinates(trainer.platform.rank).pp
                ),
                block_tokens=placed.kv_cache.blocks.tokens,
                platform=trainer.platform,
            )
    found = _responses(trainer)
    assert any(len(x) for x in expected.values())
    return [name for name, x in expected.items() if not torch.equal(x, found[name])]


def _responses(trainer: OnlineTrainer) -> dict[str, Tensor]:
    found, prompts = {}, trainer.inputs.train.batch([0, 1, 2, 3])
    for kind, temperature in (("sampled", None), ("greedy", 0.0)):
        rollout = trainer.generator.generate(
            prompts, temperature=temperature, samples_per_prompt=always(1), iteration=1, first_prompt=0
        )
        found |= {f"{kind} {name}": getattr(rollout, name) for name in ("input_ids", "lengths", "rollout_log_probs")}
    return found


@contextlib.contextmanager
def vllms_own_layers() -> Iterator[None]:
    """Within the block no layer of an engine is one call in C, and vLLM's sampler draws."""
    with (
        mock.patch.object(decoder, "_prepared", lambda *args: None),
        mock.patch.object(patches, "_draws_from_all", lambda *args: False),
    ):
        yield


def single_steps() -> contextlib.AbstractContextManager[object]:
    """Within the block vLLM's scheduler is asked before every step."""
    return mock.patch.object(decoding, "MOST_STEPS", 1)


@contextlib.contextmanager
def vllms_own_loader() -> Iterator[None]:
    """Engines that are built within the block read the files of their directory, as plain vLLM does."""
    import vllm

    real = vllm.LLM

    def build(**settings: Any) -> vllm.LLM:
        return real(**{**settings, "load_format": "auto", "model_loader_extra_config": {}})

    with mock.patch("vllm.LLM", build):
        yield


def _no_source(name: str) -> Tensor:
    raise AssertionError(f"vLLM's own loader asks nobody for {name}")
