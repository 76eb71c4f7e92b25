"""Train an actor in every layout and hand it to an engine in every layout; compare the engine with HuggingFace.

torchrun --nproc-per-node N -m tests.distributed.pairs_worker CHECKPOINTS OUT NAME ...

For each pair: two optimizer steps, a reshard in which ranks read each other's memory, but for the last, which gets
messages as if it were on another host; one more step, a reshard by messages alone. Every rank tells what its replica
generated.
"""

import functools
import gc
import importlib.util
import json
import sys
import time
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from hybridflow.architecture.spec import ModelSpec
from hybridflow.config import OptimizerConfig, RolloutConfig, SamplingConfig, TrainedRoleConfig
from hybridflow.cpu import peer_memory
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.parallel.layout import RolloutLayout
from hybridflow.placement.kv_cache import tokens_of_block
from hybridflow.reshard.execute import WeightReshard
from hybridflow.reshard.groups import engine_stages, rollout_layout, standalone_layout
from hybridflow.reshard.plan import plan_reshard
from hybridflow.roles.base import RunContext
from hybridflow.roles.objectives import KLTerm, policy_loss
from hybridflow.roles.policy import Actor
from hybridflow.rollout.engine import Request, RolloutEngine
from hybridflow.rollout.language_model import LanguageModel
from hybridflow.rollout.patches import join_groups
from tests.distributed.cases import ALGORITHM, HYPER
from tests.distributed.gather import whole
from tests.distributed.pairs import (
    BUCKET_BYTES,
    NUM_PROMPTS,
    PAIRS,
    PROMPT_LENGTH,
    RESPONSE_LENGTH,
    Pair,
)
from tests.distributed.train_batch import make_train_batch
from tests.placing import place_model
from tests.rollout.responses import responses_of
from tests.tiny_models import VOCAB_SIZE, by_model_name

SAMPLING = SamplingConfig(max_response_length=RESPONSE_LENGTH, ignore_eos=True)
ROLLOUT = RolloutConfig(max_num_seqs=16, max_num_batched_tokens=256)


def main(checkpoints: Path, out: Path, names: list[str]) -> None:
    platform = platforms.start(seed=0)
    exchange = Exchange(dist.group.WORLD, platform.device)
    world = RunContext(platform, ProcessGroups(), exchange, bucket_bytes=BUCKET_BYTES)
    if platform.rank == platform.world_size - 1:
        peer_memory.can_read = lambda introduction: False
    pairs = sorted((p for p in PAIRS if p.num_ranks == platform.world_size and p.name in names), key=training_of)
    import vllm  # noqa: F401 (what is imported later would be searched for garbage again and again)

    gc.collect()
    gc.freeze()
    results = {}
    for (family, *_), group in groupby(pairs, key=training_of):
        run = Run(checkpoints / family / "policy", world)
        for pair in group:
            started = time.perf_counter()
            results[pair.name] = run(pair)
            if platform.rank == 0:
                print(f"{pair.name}: {time.perf_counter() - started:.1f} s", flush=True)
    everyone: list[Any] = [None] * platform.world_size
    dist.all_gather_object(everyone, results)
    if platform.rank == 0:
        (out / f"{platform.world_size}.json").write_text(json.dumps(everyone))
    platforms.stop()


def training_of(pair: Pair) -> tuple[str, str, bool]:
    return pair.family, pair.case.name, pair.apart


class Run:
    """One actor, handed to one engine after another."""

    def __init__(self, model: Path, world: RunContext) -> None:
        self.world, self.model = world, model
        self.reference: PreTrainedModel | None = None
        if world.platform.rank == 0:
            self.reference = untouched_class(model).from_pretrained(model)
            self.reference.generation_config.eos_token_id = None  # as ignore_eos
        self.actor: Actor | None = None
        self.batch = make_train_batch()

    def __call__(self, pair: Pair) -> list[dict]:
        config = TrainedRoleConfig(
            model=str(self.model),
            optimizer=OptimizerConfig(lr=1e-2, eps=1e-3),
            recompute=pair.case.recompute,
            ranks=f"0-{pair.case.num_ranks - 1}",
            **pair.case.layout(),
        )
        if self.actor is None:
            placed = place_model("actor", config, self.world.platform.world_size)
            self.actor = Actor(placed, temperature=HYPER.temperature, world=self.world)
        train, rank = self.actor.grid.layout, self.world.platform.rank
        if pair.apart:
            own = tuple(range(pair.case.num_ranks, pair.num_ranks))
            layout = standalone_layout(own, pair.tp, pair.pp, expert_parallel=pair.whole_experts)
        else:
            layout = rollout_layout(train, pair.tp, pair.pp, expert_parallel=pair.whole_experts)
        spec = self.actor.spec
        plan = plan_reshard(spec, train, layout, bucket_elements=BUCKET_BYTES // 4)
        watch = Watch()
        weights = {name: x for name, (_, x) in self.actor.weights().items()}
        reshard = WatchedReshard(
            plan,
            weights,
            rank=rank,
            dtype=torch.float32,
            device=self.world.platform.device,
            group=dist.group.WORLD,
            watch=watch,
            reads=True,
        )
        engine = self._engine(reshard, layout, spec, train)
        records = []
        for num_steps in (2, 1):
            for _ in range(num_steps):
                self.actor.lr = 1e-2
                self.actor.update(self.batch, policy_loss(ALGORITHM.policy, KLTerm(ALGORITHM.kl, HYPER.kl_coef)))
            record = self._reshard_and_generate(reshard, engine, weights, watch)
            record["in_place"] = plan.is_in_place
            record["read"] = reshard.num_read
            reshard.by_messages()  # the second time
            record["planned"] = {
                "received": 4 * plan.received_elements(rank),
                "sent": 4 * plan.sent_elements(rank),
                "bound": 4 * plan.lower_bound(rank) if rank in layout else 0,
                "permuted": 4 * plan.permuted_elements(rank),
            }
            records.append(record)
        if engine is not None:
            engine.close()
        return records

    def _engine(
        self, reshard: WeightReshard, layout: RolloutLayout, spec: ModelSpec, train: Any
    ) -> RolloutEngine | None:
        stages = engine_stages(spec.num_layers, train, layout)
        join_groups(layout, stages, self.world.platform.local_rank)
        reshard.to_engine()
        engine = None
        if self.world.platform.rank in layout:
            engine = RolloutEngine(
                self.model,
                reshard.engine_tensor,
                dtype="float32",
                language_model=LanguageModel.of(spec),
                layout=layout,
                stages=stages,
                max_length=PROMPT_LENGTH + RESPONSE_LENGTH,
                sampling=SAMPLING,
                config=ROLLOUT,
                kv_cache_bytes=1 << 24,
                block_tokens=tokens_of_block(spec, cuda=False),
                platform=self.world.platform,
            )
            engine.sleep()
        reshard.to_trainer()
        return engine

    def _reshard_and_generate(
        self, reshard: WeightReshard, engine: RolloutEngine | None, weights: dict[str, Tensor], watch: "Watch"
    ) -> dict:
        """What the engine generates with the trainer's weights of now, and what the reshard took."""
        before, expected = {name: x.clone() for name, x in weights.items()}, self._expected()
        watch.start()
        cost = reshard.to_engine()
        watch.stop()
        dist.barrier(group=dist.group.WORLD)
        tokens = None
        if engine is not None:
            engine.wake_up()
            engine.reset_prefix_cache()
            requests = [Request(prompt, 0) for prompt in prompts().tolist()]
            tokens = [r.token_ids for r in responses_of(engine, requests, engine.params_at(0.0, SAMPLING, ()))]
            engine.sleep()
        back = reshard.to_trainer()
        return {
            "right": tokens is None or tokens == expected,
            "generated": tokens is not None,
            "restored": all(torch.equal(before[name], x) for name, x in weights.items()),
            "cost": vars(cost),
            "back": vars(back),
            "measured_peak_extra": watch.peak_extra,
        }

    def _expected(self) -> list[list[int]]:
        """HuggingFace's greedy tokens with the actor's weights, the same on every rank."""
        tensors = whole(self.actor, lambda p: p.data)
        box = [None]
        if self.reference is not None:
            tensors = by_model_name(tensors, self.actor.spec.family)
            self.reference.load_state_dict(tensors, strict=not self.reference.config.tie_word_embeddings)
            with torch.no_grad():
                out = self.reference.generate(
                    prompts(),
                    attention_mask=torch.ones(NUM_PROMPTS, PROMPT_LENGTH, dtype=torch.int64),
                    do_sample=False,
                    max_new_tokens=RESPONSE_LENGTH,
                )
            box = [out[:, PROMPT_LENGTH:].tolist()]
        dist.broadcast_object_list(box, src=0, group=dist.group.WORLD)
        return box[0]


def untouched_class(model: Path) -> type[PreTrainedModel]:
    """The model's class from a copy of its module: vLLM changes those classes that it runs itself."""
    config = AutoConfig.from_pretrained(model)
    return getattr(untouched(type(config).__module__.replace("configuration", "modeling")), config.architectures[0])


@functools.cache
def untouched(name: str) -> ModuleType:
    module = importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(module.__name__ + "_untouched", module.__file__)
    copy = importlib.util.module_from_spec(spec)
    sys.modules[copy.__name__] = copy
    spec.loader.exec_module(copy)
    return copy


def prompts() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(4, VOCAB_SIZE, (NUM_PROMPTS, PROMPT_LENGTH), generator=generator)


class Watch:
    """Bytes of all live tensors of this process, looked at whenever the reshard allocates or releases something."""

    def __init__(self) -> None:
        self.peak_extra = self._before = self._peak = 0
        self._known: list[Tensor] | None = None

    def __call__(self) -> None:
        if self._known is not None:
            self._peak = max(self._peak, self._bytes())

    def start(self) -> None:
        gc.disable()  # what is new then stays in the youngest generation
        self._known = live_tensors(None)
        self._before = self._peak = self._bytes()

    def stop(self) -> None:
        self.peak_extra = self._peak - max(self._before, self._bytes())
        self._known = None
        gc.enable()

    def _bytes(self) -> int:
        storages = [x.untyped_storage() for x in self._known + live_tensors(0)]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


class WatchedReshard(WeightReshard):
    """Looks at the live tensors whenever it counts memory that was allocated or released."""

    def __init__(self, *arguments: Any, watch: Watch, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._watch = watch

    @property
    def num_read(self) -> int:
        """Peers in whose memory this rank has read."""
        return 0 if self._reads is None else len(self._reads.sources)

    def by_messages(self) -> None:
        self._reads = None

    def _changed(self, num_bytes: int) -> None:
        super()._changed(num_bytes)
        self._watch()


def live_tensors(generation: int | None) -> list[Tensor]:
    kinds = (Tensor, nn.Parameter)  # isinstance would ask torch's metaclass about each of many objects
    return [x for x in gc.get_objects(generation) if type(x) in kinds and not x.is_meta]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
