"""The engine, and the reshard of the actor's weights to it: here reshard and rollout meet.

with generator.resharded():             # alias / permute / gather, and back
    with generator.awake():             # KV cache
        rollout = generator.generate(prompts, ...)
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hybridflow.architecture.flops import forward_flops
from hybridflow.architecture.weights import frozen_weights
from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.config.length_buckets import LengthBuckets
from hybridflow.models.layer_specs import DTYPES
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.parallel.platform import Platform, world_group
from hybridflow.placement.cache_room import cache_report, cache_words, sized_here
from hybridflow.placement.forecast import engine_bytes
from hybridflow.placement.kv_cache import KVCacheSize
from hybridflow.placement.placed import PlacedRun
from hybridflow.recording.measure import Stopwatch, own_bytes
from hybridflow.reshard.device_memory import reserve_address_space
from hybridflow.reshard.execute import ReshardCost, WeightReshard
from hybridflow.reshard.plan import plan_reshard
from hybridflow.roles.engine_replica import ReleasingListener, check_same_tokens
from hybridflow.roles.policy import Actor
from hybridflow.roles.warm_up import warm_up
from hybridflow.rollout.adapters import engine_adapters
from hybridflow.rollout.engine import RolloutEngine
from hybridflow.rollout.generation import (
    RolloutListener,
    RolloutRequest,
    check_rows,
    fail_together,
    replica_responses,
    whole_rollout,
)
from hybridflow.rollout.language_model import LanguageModel
from hybridflow.rollout.partial import Place, ReplicaWork, UnderWay, replica_rows
from hybridflow.rollout.patches import engine_pipelines, join_groups
from hybridflow.rollout.row import RolloutRow
from hybridflow.rollout.rows import TurnCounts
from hybridflow.rollout.runner import second_runner
from hybridflow.rollout.turns import EnvironmentRows, LeaderBroadcast, TurnTaking

T = TypeVar("T")


class Generator:
    """The vLLM engine of this rank, and the reshard of the actor's weights to it.

    Building it is collective over the world. A rank outside the rollout has no engine, but takes part in all calls.

    why_eager: why the engine has no CUDA graphs where the config lets it have them. environments: who answers rows,
    which takes the world's `groups`; None: nobody. params: vLLM's sampling parameters of `sampled`.
    costs: of the reshards since the list was emptied. own_bytes: the engine's weights outside the trainer's memory.
    """

    def __init__(
        self,
        placed: PlacedRun,
        actor: Actor,
        *,
        eos_token_ids: tuple[int, ...],
        platform: Platform,
        exchange: Exchange,
        environments: EnvironmentRows | None = None,
        groups: ProcessGroups | None = None,
    ) -> None:
        self._placed, self._actor, self._platform, self._exchange = placed, actor, platform, exchange
        self.layout, config, self.routing = placed.rollout, placed.config, placed.routing
        dtype = DTYPES[actor.dtype]
        bucket, layouts = placed.bucket_bytes // dtype.itemsize, (actor.grid.layout, self.layout)
        weights = {name: tensor for name, (_, tensor) in actor.weights().items()}
        plan = plan_reshard(actor.spec, *layouts, bucket_elements=bucket, dtype=actor.dtype)
        space, self.why_eager = None, None
        if placed.captures_graphs and self._hooks_routers():
            self.why_eager = "hooks on its routers record the experts that algorithm.policy.replay_routing asks for"
        elif placed.captures_graphs and not plan.is_in_place:
            space, self.why_eager = reserve_address_space(platform.device, exchange)
        self.reshard = WeightReshard(
            plan,
            weights,
            rank=platform.rank,
            dtype=dtype,
            device=platform.device,
            group=world_group(),
            space=space,
            reads=True,
            frozen=frozen_weights(actor.spec, "lm") if placed.keeps_base else (),
        )
        groups = groups or ProcessGroups()
        self._replica = groups.own(self.layout.replicas) if len(self.layout.replicas[0]) > 1 else None
        own = self.layout.coordinates(platform.rank).replica if platform.rank in self.layout else 0
        self._environments, self._agreement = environments, LeaderBroadcast(self._replica, self.layout.replicas[own][0])
        self._open_rows: TurnTaking | None = None  # of partial rollouts, once there are any
        self.costs: list[ReshardCost] = []
        self.engine: RolloutEngine | None = None
        self.own_bytes, self.params, self._eos_token_ids = 0, {}, eos_token_ids
        self._awake = False  # for good, see `sync_weights`
        custom = not config.rollout.engine_arguments.disable_custom_all_reduce
        join_groups(self.layout, placed.stages, platform.local_rank, custom_all_reduce=custom)
        warm_up(placed, groups, platform.device, engine_pipelines())
        with self.resharded():  # the engine counts memory that was taken before as the engine's
            self.kv_cache = self._sized_cache()
            if platform.rank in self.layout:
                self.engine = self._new_engine(actor)
                self.params = {"sampled": self.engine.sampling_params(config.sampling, eos_token_ids)}
                self.own_bytes = own_bytes(self.engine.parameters().values(), weights.values())
                self.engine.sleep()
        self.costs.clear()

    def _hooks_routers(self) -> bool:
        """Whether it is vLLM's older runner that records experts, whose hooks no graph calls."""
        config, cuda, cuts = self._placed.config, self._placed.cuda, self._placed.config.rollout.partial is not None
        second = second_runner(config.sampling, cuda=cuda, pp=self.layout.pp, cuts_routes=cuts)
        return self.routing is not None and not second

    def _sized_cache(self) -> KVCacheSize:
        """Alike on all ranks, by the rank that has least. Collective over the world."""
        placed, platform = self._placed, self._platform
        there = torch.tensor([-platform.memory_bytes(), -platform.free_bytes()], device=self._exchange.device)
        memory, free = (-int(each) for each in self._exchange.maximum(there))
        if placed.kv_cache.is_given:
            return placed.kv_cache
        if not placed.cuda:  # all else of a host takes of the same memory
            return placed.kv_cache.within(free // 2)
        beside = engine_bytes(placed.config, self._actor.spec, cut=self.layout.cut, pp=self.layout.pp)
        return sized_here(placed, memory=memory, free=free, beside=beside)

    def _new_engine(self, actor: Actor) -> RolloutEngine:
        config, changes = self._placed.config, {"max_num_seqs": self._placed.sequences_of_step(self.kv_cache)}
        if self.why_eager is not None:
            changes["enforce_eager"] = True
        rollout = config.rollout.model_copy(update=changes)
        return RolloutEngine(
            actor.spec.path,
            self.reshard.engine_tensor,
            dtype=config.actor.dtype,
            language_model=LanguageModel.of(actor.spec, window_tables=self.kv_cache.blocks.windows > 0),
            layout=self.layout,
            stages=self._placed.stages,
            max_length=config.max_sequence_length,
            sampling=config.sampling,
            config=rollout,
            kv_cache_bytes=self.kv_cache.of_stage(self._placed.stages, self.layout.coordinates(self._platform.rank).pp),
            block_tokens=self.kv_cache.blocks.tokens,
            platform=self._platform,
            routing=self.routing,
            adapters=engine_adapters(actor.spec),
        )

    @contextlib.contextmanager
    def resharded(self) -> Iterator[None]:
        """Within the block the engine has the actor's weights; after it the trainer has them, bitwise as before."""
        self._actor.wait_for_weights()
        self.costs.append(self.reshard.to_engine())
        try:
            yield
        finally:
            if self.reshard.with_engine:
                self.costs.append(self.reshard.to_trainer())

    def sync_weights(self) -> None:
        """The engine, which stays awake, has the actor's weights from now on, and forgets what it computed with others.

        Collective over the world. Only for an engine on ranks of its own, idle at the moment.
        """
        if self.reshard.with_engine:
            self.costs.append(self.reshard.to_trainer())
        self._actor.wait_for_weights()
        self.costs.append(self.reshard.to_engine())
        dist.barrier(group=world_group())  # nobody changes a weight that another rank still reads
        if self.engine is not None:
            if not self._awake:
                self.engine.wake_up()
                self._awake = True
            self.engine.reset_prefix_cache()

    def give_back(self) -> None:
        """This rank has nothing more to generate within the block: the cache is released, the trainer has the weights.

        Local: other replicas still work. What a rank holds from now on is at most what it holds while models train.
        """
        if self.engine is not None:
            self.engine.sleep()
        self.costs.append(self.reshard.to_trainer())

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Within the block the engine has its KV cache, empty at first. The engine's weights must be in place."""
        if self.engine is None:
            yield
            return
        self.engine.wake_up()
        self.engine.reset_prefix_cache()
        try:
            yield
        finally:
            self.engine.sleep()

    def pop_cache_use(self) -> dict[str, float]:
        """Metrics of the engine's KV cache since the last call, zero on a rank without an engine."""
        most, preemptions = (0.0, 0) if self.engine is None else self.engine.cache_use.pop()
        return {"rollout/kv_cache_use_max": most, "rollout/preemptions": float(preemptions)}

    def count_work(self, rollout: RolloutBatch, watch: Stopwatch) -> None:
        """Count the forward pass of whole rows on the ranks of the engines, which share the rows."""
        if self.engine is not None:
            outputs = int((rollout.lengths - rollout.prompt_lengths).sum())
            flops = forward_flops(self._actor.spec, rollout.lengths, outputs, head="lm")
            watch.count(flops / sum(map(len, self.layout.replicas)), self._actor.dtype)

    def _fail_together(self, generate: Callable[[], T], **listener: Any) -> T | None:
        """See `generation.fail_together`. Collective over the world."""
        return fail_together(generate, self.engine, self._exchange.group, size=len(self.layout.replicas[0]), **listener)

    @property
    def turn_counts(self) -> TurnCounts | None:
        """Of this rank, where an environment answers."""
        return None if self._environments is None else self._environments.counts

    @property
    def _num_rewards(self) -> int:
        return 0 if self._environments is None else self._environments.num_rewards

    def notes(self) -> list[str]:
        """What the user should know of the choices that were made."""
        lines = [] if self.kv_cache.is_given else [f"rollout: {cache_words(self._placed, self.kv_cache)}"]
        if self.engine is not None:
            lines.extend(f"rollout: {note}" for note in self.engine.notes())
        if self.why_eager is not None:
            lines.append(f"rollout: the engine runs without CUDA graphs: {self.why_eager}")
        return lines

    def cache_report(self) -> dict[str, Any] | None:
        """The size of the KV cache, for the record of the run."""
        return cache_report(self._placed, self.kv_cache)

    def generate(
        self,
        prompts: PromptBatch,
        *,
        temperature: float | None = None,
        samples_per_prompt: LengthBuckets[int],
        iteration: int,
        first_prompt: int,
        generation: int = 0,
        listener: RolloutListener | None = None,
    ) -> RolloutBatch:
        """Responses to each prompt, as many as `samples_per_prompt` says. temperature: None: of `sampling`; 0: greedy.

        Collective over the world. generation: how often the iteration has sampled responses to these prompts before.
        listener: waits when this rank has given back what the engine had; nothing more can be generated in the block.
        """
        releasing = None if listener is None else ReleasingListener(self.give_back, listener)
        asked = self.build_request(
            prompts,
            temperature=temperature,
            samples_per_prompt=samples_per_prompt,
            iteration=iteration,
            first_prompt=first_prompt,
            generation=generation,
        )
        own = self._fail_together(lambda: self.responses(asked, releasing), listener=releasing) or {}
        return self.gather_rollout(asked, own)

    def generate_partly(
        self,
        under_way: UnderWay,
        prompts: Mapping[int, PromptBatch],
        *,
        wanted: int,
        iteration: int,
        max_staleness: int,
    ) -> int:
        """Go on with groups until `wanted` of them are whole, and add what came to the rows. Collective over the world.

        The engine is awake, with the weights that iteration `iteration` begins with. prompts: of the groups, one each,
        by position in the run. Returns the tokens of rows that environments still answer, which are not added.
        """
        config, count, stays = self._placed.config, len(self.layout.replicas), self._environments is not None
        limits = {"wanted": wanted, "iteration": iteration, "max_staleness": max_staleness}
        work = under_way.work(count, **limits, sampling=config.sampling, stays=stays)
        own = self._fail_together(lambda: self._rows(under_way, prompts, work, version=iteration - 1)) or {}
        check_same_tokens(sorted(own.items()), self._replica)
        contributed = own if self.layout.contributes(self._platform.rank) else {}
        added = under_way.gathered(contributed, self._exchange, self._num_rewards)
        if self.routing is not None:
            under_way.record(added, own, work)
        under_way.add(added, iteration - 1)
        if self._environments is None:
            return 0
        left = 0 if self._open_rows is None else self._open_rows.num_open_tokens
        return int(self._exchange.sum(torch.tensor(left, device=self._exchange.device)))

    def _rows(
        self,
        under_way: UnderWay,
        prompts: Mapping[int, PromptBatch],
        work: Sequence[ReplicaWork],
        *,
        version: int,
    ) -> dict[Place, RolloutRow]:
        """What this rank's replica adds; nothing on a rank without an engine. Collective over the replica.

        Where an environment answers these are whole rows: others stay here, with who answers them.
        """
        if self.engine is None:
            return {}
        config, params = self._placed.config, self.params["sampled"]
        part = work[self.layout.coordinates(self._platform.rank).replica]
        requests = under_way.requests(part.groups, config.seed, config.sampling)
        if self._environments is None:
            return replica_rows(self.engine, params, requests, part)
        turns = self._open_rows = self._open_rows or self._turns(self._environments, self.engine)
        new = under_way.new_rows(
            requests, turns.open_rows, prompts, limits=config.sampling.limits, run_seed=config.seed
        )
        places = {under_way.groups[place].position: place for place in part.groups}
        urgent = {under_way.groups[place].position for place in part.urgent}
        ended = turns.until_whole(self.engine, params, new, number=part.number, urgent=urgent, version=version)
        return {(places[position], sample): row for (position, sample), row in ended.items()}

    def _turns(self, environments: EnvironmentRows, engine: RolloutEngine) -> TurnTaking:
        return TurnTaking(environments, self._agreement, room=engine.most_rows)

    def end_rows(self) -> None:
        """Rows under way do not go on."""
        if self._open_rows is not None:
            self._open_rows.abandon()

    def build_request(
        self,
        prompts: PromptBatch,
        *,
        temperature: float | None = None,
        samples_per_prompt: LengthBuckets[int],
        iteration: int,
        first_prompt: int,
        generation: int = 0,
    ) -> RolloutRequest:
        """The request for these responses: prompts, counts and seeds. Local, and equal on all ranks."""
        config, again = self._placed.config, (generation,) if generation else ()
        counts = torch.tensor(samples_per_prompt.for_lengths(prompts.lengths.tolist()), dtype=torch.int64)
        seed = (config.seed, iteration, *again)
        return RolloutRequest(
            prompts, counts, config.sampling, seed, first_prompt=first_prompt, temperature=temperature
        )

    def responses(self, asked: RolloutRequest, listener: RolloutListener | None = None) -> dict[int, RolloutRow]:
        """Those of this rank's replica, by row; none on a rank without an engine. Collective over the replica."""
        if self.engine is None:
            return {}
        config, params = self._placed.config, self.params["sampled"]
        if asked.temperature is not None:
            params = self.engine.params_at(asked.temperature, config.sampling, self._eos_token_ids)
        own = asked.prompts_of_replicas(len(self.layout.replicas))
        turns = None if self._environments is None else self._turns(self._environments, self.engine)
        prompts = own[self.layout.coordinates(self._platform.rank).replica]
        return replica_responses(self.engine, params, asked, prompts, listener=listener, turns=turns)

    def gather_rollout(self, asked: RolloutRequest, own: Mapping[int, RolloutRow]) -> RolloutBatch:
        """The rollout that was asked for, whole on all ranks. Collective over the world. own: of the replica."""
        check_same_tokens(own.items(), self._replica)
        contributed = own if self.layout.contributes(self._platform.rank) else {}
        rollout = whole_rollout(asked, contributed, exchange=self._exchange, num_rewards=self._num_rewards)
        if asked.temperature is None:
            check_rows(rollout)
        if asked.temperature is not None or self._actor.records is None:  # nothing is trained on the others
            return rollout
        pieces = asked.pieces(rollout, own, len(self.layout.replicas))
        return self._actor.records.add(rollout, pieces, iteration=asked.seed[1])
