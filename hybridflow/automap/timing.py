"""Seconds of an iteration, predicted from shapes, layouts and a device profile. Pure.

    prediction = predict(place(config, 8), load_profile("h100-sxm"))
    prediction.seconds, prediction.phases, prediction.spans, prediction.idle

What a search keeps by role is in `role_time` (scoring, updates) and `generation_time`; `reshard_cost`, `exchange_cost`
and `save_cost` are here. All take a `Device`, which keeps the rates that it was asked for.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Self

from hybridflow.automap.cost import Cost, Device, total
from hybridflow.automap.device import DeviceProfile
from hybridflow.automap.generation_time import Responses, generation_cost
from hybridflow.automap.mean_rows import MeanRows
from hybridflow.automap.role_time import forward_cost, update_cost
from hybridflow.automap.step_time import staging_cost
from hybridflow.automap.timeline import Span, TimedOperation, busy_seconds, schedule
from hybridflow.config import ExperimentConfig, TrainedRoleConfig
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.config.kinds import AnyConfig
from hybridflow.placement.footprint import ITEM_BYTES, stage_optimizer_bytes
from hybridflow.placement.kv_cache import KVCacheSize
from hybridflow.placement.overlapped_scoring import (
    UNITS_PER_BLOCK,
    asks_for_log_probs,
    num_deferred_rows,
    overlapped_models,
)
from hybridflow.placement.placed import PlacedModel, PlacedModels, PlacedRun
from hybridflow.placement.saving import written_bytes
from hybridflow.reshard.plan import ReshardPlan, plan_reshard

SCORING_PHASES = {"actor": "log_probs", "reference": "reference", "critic": "values", "reward_model": "scores"}
HAND_OVER = "hand_over"  # of a rollout, where the engine generates beside the models
EXCHANGED_BYTES = 4  # of a token


@dataclass(frozen=True)
class Work:
    """What an iteration has to do. prompt, mean, longest: tokens of prompts and of responses."""

    prompts: int
    samples: int
    prompt: float
    mean: float
    longest: float
    ranks_per_host: int

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def tokens(self) -> float:
        return self.sequences * (self.prompt + self.mean)


@dataclass(frozen=True)
class Prediction:
    """spans: in program order. idle: the share of the iteration that each rank waits. See `Span`."""

    seconds: float
    spans: tuple[Span, ...]
    idle: tuple[float, ...]
    tokens_per_second_per_device: float

    @cached_property
    def phases(self) -> Mapping[str, float]:
        """Seconds of each phase on the rank that spends most in it."""
        sums: dict[str, dict[int, float]] = {}
        for span in self.spans:
            of_phase = sums.setdefault(span.phase, {})
            for rank in span.ranks:
                of_phase[rank] = of_phase.get(rank, 0.0) + span.seconds
        return {phase: max(ranks.values()) for phase, ranks in sums.items()}


def work_of(config: AnyConfig, profile: DeviceProfile) -> Work:
    """Of prompts that are as long as they may be, and of responses with the expected mean."""
    hosts = profile.ranks_per_host
    if isinstance(config, FixedDataConfig):
        data = config.data
        return Work(config.batch_size, 1, 0, data.max_length, data.max_length, ranks_per_host=hosts)
    samples = max(config.sampling.samples.values)
    prompt, sampling = config.data.max_prompt_length, config.sampling
    lengths = (prompt, sampling.mean_response_length, sampling.max_response_length)
    return Work(config.data.prompts_per_iteration, samples, *lengths, hosts)


def predict(run: PlacedModels, profile: DeviceProfile, work: Work | None = None) -> Prediction:
    """One iteration. work: None: `work_of` the config. Errors: ConfigError where the profile lacks a dtype."""
    work, device = work or work_of(run.config, profile), Device(profile)
    found = _generated(run, work, device) if isinstance(run, PlacedRun) else _fixed(run, work, device)
    spans = schedule(
        tuple(found),
        ranks_per_host=work.ranks_per_host,
        shared=profile.shared is not None,
        crowded=lambda busy, role: profile.crowded(busy, engine=role == "engine"),
    )
    spans = tuple(span for span in spans if span.seconds)
    seconds = max(span.begin + span.seconds for span in spans)
    busy = busy_seconds(spans)
    idle = tuple(1 - busy.get(rank, 0.0) / seconds for rank in range(run.world_size))
    return Prediction(seconds, spans, idle, work.tokens / seconds / run.world_size)


# ------------------------------------------------------------------------------------------------ an iteration


def _generated(run: PlacedRun, work: Work, device: Device) -> Iterator[TimedOperation]:
    """In the order of `flows`: generate, score, exchange, update. Engines beside the models hand over at the end."""
    config, world = run.config, tuple(range(run.world_size))
    beside = config.rollout.is_one_step_off
    flow = tuple(rank for rank in world if rank not in run.rollout) if beside else world
    whole, note = _exchange_costs(work, device, run.world_size)
    exchange, own_note = _exchange_costs(work, device, len(flow))
    reshard = reshard_cost(run, device, work.ranks_per_host, _bucket_elements(run))
    offloads = () if beside else tuple(offload_cost(model, device) for model in run.models.values())
    yield TimedOperation("reshard", "actor", world, total((reshard, *offloads)))
    generated = generation_cost(
        run.actor.spec,
        cut=run.rollout.cut,
        pp=run.rollout.pp,
        dtype=run.actor.config.dtype,
        responses=responses_of(run, work),
        device=device,
    )
    for replica in run.rollout.replicas:
        ranks = tuple(sorted(replica))
        stages = tuple(run.rollout.coordinates(rank).pp for rank in ranks)
        yield TimedOperation("generate", "engine", ranks, generated, stages)
    handed_over = total((whole.times(2), note.times(3)))
    if not beside:
        yield TimedOperation("exchange", "", world, handed_over)
    waiting = overlapped_models(run)
    for name in scoring_order(config, run.computing):
        yield from _scored(run.computing[name], config, work, device, in_units=name in waiting)
    yield TimedOperation("exchange", "", flow, exchange + own_note.times(3))
    for name in ("critic", "actor"):
        if name in run.models:
            cost = training_cost(run.models[name], config, work, device)
            yield _of_grid(f"{name}_update", run.models[name], run.models[name].layout.ranks, cost)
    yield TimedOperation("exchange", "", flow, own_note.times(4))
    if beside:
        yield TimedOperation(HAND_OVER, "engine", world, handed_over)
    yield from _saved(run, device, work)


def _exchange_costs(work: Work, device: Device, num_ranks: int) -> tuple[Cost, Cost]:
    """Of a number a token, and of a note: lengths, who has done what, whether to stop."""
    hosts = ceil(num_ranks / work.ranks_per_host)
    whole, note = (exchange_cost(tokens, num_ranks, device, hosts=hosts) for tokens in (work.tokens, 0))
    return whole, note


def scoring_order(config: AnyConfig, models: Collection[str]) -> list[str]:
    """As the flows ask: reward models, the actor's log-probs, the reference's, values; on fixed data all or none."""
    if isinstance(config, FixedDataConfig):
        return [] if config.algorithm.kind == "sft" else list(models)
    asked = [name for name in models if name.startswith("reward")]
    if asks_for_log_probs(config):
        asked.append("actor")
    return asked + [name for name in ("reference", "critic") if name in models]


def _scored(
    model: PlacedModel, config: AnyConfig, work: Work, device: Device, *, in_units: bool
) -> Iterator[TimedOperation]:
    """Each replica a share of the rows."""
    cost = scoring_cost(model, config, work, device, in_units=in_units)
    phase = SCORING_PHASES.get(model.name, "reward")
    for block in model.layout.groups("tp", "pp"):
        yield _of_grid(phase, model, block, cost)


def _of_grid(phase: str, model: PlacedModel, ranks: tuple[int, ...], cost: Cost) -> TimedOperation:
    stages = tuple(model.layout.coordinates(rank).pp for rank in ranks) if cost.waits else ()
    return TimedOperation(phase, model.name, ranks, cost, stages)


def scoring_cost(model: PlacedModel, config: AnyConfig, work: Work, device: Device, *, in_units: bool = False) -> Cost:
    """Of one replica, with a share of an iteration's rows.

    in_units: the model may score before the rollout is whole (`placement.overlapped_scoring`). Units of rows then have
    micro-batches of their own, also of those that are scored later.
    """
    rows = scored_rows(model.name, config, work).split(model.layout.dp)
    units = min(UNITS_PER_BLOCK, max(1, rows.number // rows.samples)) if in_units else 1
    return forward_cost(model.spec, model.layout, model.config, rows, device, head=model.head, units=int(units))


def training_cost(model: PlacedModel, config: AnyConfig, work: Work, device: Device) -> Cost:
    """All optimizer steps of an iteration."""
    assert isinstance(model.config, TrainedRoleConfig), f"{model.name} has no optimizer"
    rows, steps = updated_rows(model.name, config, work)
    step = update_cost(model.spec, model.layout, model.config, rows, device, head=model.head)
    if model.config.offload_optimizer == "always":
        step += staging_cost(model.spec, model.layout, model.config, device, head=model.head)
    return step.times(steps)


def scored_rows(name: str, config: AnyConfig, work: Work) -> MeanRows:
    """Of an iteration, by the model's config key. The actor's without those whose log-probs come with an update."""
    rows = MeanRows(work.sequences, work.prompt, work.mean, work.samples, whole=name.startswith("reward"))
    if name != "actor":
        return rows
    number = work.sequences - min(num_deferred_rows(config), work.sequences)
    if config.algorithm.update.whole_prompts:
        return replace(rows, number=number)
    return replace(rows, number=number, samples=max(1, round(work.samples * number / work.sequences)))


def updated_rows(name: str, config: AnyConfig, work: Work) -> tuple[MeanRows, int]:
    """(rows of an optimizer step, steps of an iteration)."""
    together, whole = _together(config, work), name.startswith("reward")
    rows = MeanRows(_mini_batch(config, work), work.prompt, work.mean, together, whole)
    return rows, config.algorithm.update.epochs * ceil(work.sequences / _mini_batch(config, work))


def _saved(run: PlacedModels, device: Device, work: Work) -> Iterator[TimedOperation]:
    """The part of a save that an iteration has."""
    interval = run.config.checkpoint.save_interval
    if interval:
        cost = save_cost(run, device, work.ranks_per_host).times(1 / interval)
        yield TimedOperation("save", "", tuple(range(run.world_size)), cost)


def _fixed(run: PlacedModels, work: Work, device: Device) -> Iterator[TimedOperation]:
    """In the order of `flows.fixed`: what the loss asks of the models, then a step."""
    world, trained = tuple(range(run.world_size)), run.trained
    exchange = exchange_cost(work.tokens, run.world_size, device, hosts=ceil(run.world_size / work.ranks_per_host))
    scored = scoring_order(run.config, run.computing)
    for name in scored:
        yield from _scored(run.computing[name], run.config, work, device, in_units=False)
    if scored:
        yield TimedOperation("exchange", "", world, exchange)
    cost = training_cost(trained, run.config, work, device)
    yield _of_grid(f"{trained.name}_update", trained, trained.layout.ranks, cost)
    yield TimedOperation("exchange", "", world, exchange_cost(0, run.world_size, device))
    yield from _saved(run, device, work)


# ------------------------------------------------------------------------------------------------ parts


def responses_of(run: PlacedRun, work: Work) -> Responses:
    """Of the busiest replica."""
    return share_of_responses(run.config, len(run.rollout.replicas), run.kv_cache, work, cuda=run.cuda)


def share_of_responses(
    config: ExperimentConfig, replicas: int, kv_cache: KVCacheSize, work: Work, *, cuda: bool
) -> Responses:
    prompts = ceil(work.prompts / replicas)
    length = config.max_sequence_length
    held = max(1, int(kv_cache.whole // max(kv_cache.least, 1)))  # of the longest sequences
    held = max(held, int(held * length / (work.prompt + work.mean)))
    return Responses(
        number=prompts * work.samples,
        prompts=prompts,
        prompt=work.prompt,
        mean=work.mean,
        longest=work.longest,
        at_once=min(config.rollout.sequences_of_step(prompts * work.samples, held, cuda=cuda), held),
        batched_tokens=config.rollout.batched_tokens(length, cuda=True),
        prefix_caching=config.rollout.enable_prefix_caching,
    )


def reshard_cost(run: PlacedRun, device: Device, ranks_per_host: int, bucket_elements: int) -> Cost:
    """From training to engine shards: what the busiest rank receives or sends, over the slowest link that it comes by;
    what it permutes in place, there and back. Not what the engine keeps since the first."""
    actor, rollout = run.actor, run.rollout
    plan = plan_reshard(
        actor.spec,
        actor.layout,
        rollout,
        bucket_elements=bucket_elements,
        dtype=actor.config.dtype,
        changing=run.keeps_base,
    )
    hosts = 2 if _crosses_hosts(plan, ranks_per_host) else 1
    return moving_cost(
        Moved.from_plan(plan, ITEM_BYTES[actor.config.dtype]), device, hosts=hosts, busy=len(rollout.ranks)
    )


@dataclass(frozen=True)
class Moved:
    """Bytes of a reshard, each of the rank that has most."""

    received: int
    sent: int
    permuted: int

    @classmethod
    def from_plan(cls, plan: ReshardPlan, itemsize: int) -> Self:
        received = max(plan.received_elements(rank) for rank in plan.rollout.ranks)
        sent = max(plan.sent_elements(rank) for rank in plan.train.ranks)
        permuted = max(plan.permuted_elements(rank) for rank in plan.rollout.ranks)
        return cls(itemsize * received, itemsize * sent, itemsize * permuted)


def moving_cost(moved: Moved, device: Device, *, hosts: int, busy: int) -> Cost:
    """Messages over a link of so many hosts; what is permuted is read and written, there and back."""
    permuting = device.memory(2 * 2 * moved.permuted, busy=busy)
    if not moved.received:
        return permuting
    return device.send(max(moved.received, moved.sent), hosts=hosts).times(1, busy=busy) + permuting


def _crosses_hosts(plan: ReshardPlan, ranks_per_host: int) -> bool:
    """Whether the ranks lie on several hosts and some receive weights from another one."""
    ranks = {*plan.train.ranks, *plan.rollout.ranks}
    if len({rank // ranks_per_host for rank in ranks}) == 1:
        return False
    first = plan.rollout.ranks[0]
    copy = plan.train.copy_index("experts", plan.origin(first))
    sources = (plan.train.rank_at(plan.train.in_expert_copy(copy, source)) for source in plan.sources(first))
    return any(source // ranks_per_host != first // ranks_per_host for source in sources)


def offload_cost(model: PlacedModel, device: Device) -> Cost:
    """Optimizer state to host memory and back, where the config wants it there while the engine works.

    What is always there comes with the steps, see `training_cost`.
    """
    config = model.config
    if not isinstance(config, TrainedRoleConfig) or config.offload_optimizer is not True:
        return Cost()
    size = max(stage_optimizer_bytes(model.spec, model.head, model.layout, config))
    return device.to_host(2 * size, busy=len(model.layout.ranks))


def exchange_cost(tokens: float, world_size: int, device: Device, *, hosts: int = 1) -> Cost:
    """A sum over all ranks of a number a token."""
    return device.all_reduce(EXCHANGED_BYTES * tokens, world_size, hosts=hosts)


def save_cost(run: PlacedModels, device: Device, ranks_per_host: int) -> Cost:
    """What the ranks of the busiest host write; with checkpoint.async_save only the copies to host memory."""
    written = dict.fromkeys(range(run.world_size), 0)
    for model in run.models.values():
        if isinstance(model.config, TrainedRoleConfig):
            for rank, size in written_bytes(model, bucket_bytes=None).items():
                written[rank] += size
    if run.config.checkpoint.async_save:
        return device.to_host(max(written.values()), busy=run.world_size)
    of_hosts: dict[int, int] = {}
    for rank, size in written.items():
        of_hosts[rank // ranks_per_host] = of_hosts.get(rank // ranks_per_host, 0) + size
    return device.to_disk(max(of_hosts.values()))


def _mini_batch(config: AnyConfig, work: Work) -> int:
    """Sequences of a step: the config's part of the batch."""
    share = config.mini_batch_size / config.batch_size
    return max(1, round(work.sequences * share))


def _together(config: AnyConfig, work: Work) -> int:
    """Rows of a prompt in one mini-batch: rows are shuffled, so that hardly any meet, unless prompts stay whole."""
    update = config.algorithm.update
    return work.samples if update.whole_prompts or _mini_batch(config, work) == work.sequences else 1


def _bucket_elements(run: PlacedRun) -> int:
    return run.config.rollout.bucket_bytes(cuda=True) // ITEM_BYTES[run.actor.config.dtype]
