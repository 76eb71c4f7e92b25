"""Training on what the actor generates. Start it under torchrun:

trainer = OnlineTrainer.from_yaml("configs/quickstart.yaml", ["seed=3"])
trainer.fit()
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.checkpoint.state import RunState
from hybridflow.config import ExperimentConfig
from hybridflow.config.staleness import staleness_notes
from hybridflow.data.digests import run_digests
from hybridflow.data.inputs import Inputs, load_inputs
from hybridflow.data.row_notes import mixture_lines
from hybridflow.errors import ConfigError, Stopped
from hybridflow.flows.bookkeeping import OnlineBookkeeping
from hybridflow.flows.draws import PromptDraws
from hybridflow.flows.engine_ranks import EngineRanks, EnginesApart
from hybridflow.flows.evaluate import evaluate
from hybridflow.flows.generation import Moment, Source
from hybridflow.flows.hooks import RunHooks
from hybridflow.flows.of_algorithm import flow_of
from hybridflow.flows.replay import Replay, dumped_batches, with_experts
from hybridflow.flows.run import Run
from hybridflow.parallel import platform as platforms
from hybridflow.parallel import torchrun
from hybridflow.parallel.agreement import check_agreement
from hybridflow.parallel.device import choose_platform
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.parallel.watchdog import Watchdog
from hybridflow.placement.hosts import check_hosts, parse_hosts
from hybridflow.placement.placed import PlacedRun, place
from hybridflow.recording.iteration import Iteration
from hybridflow.recording.measure import Stopwatch
from hybridflow.recording.recorder import Recorder, RunSummary
from hybridflow.recording.traces import stage_traces
from hybridflow.roles.base import RunContext, TrainedRole
from hybridflow.rollout.patches import prepare_vllm
from hybridflow.rollout.routing_records import RoutingRecords
from hybridflow.trainers import loop
from hybridflow.trainers.auto import read_for_run
from hybridflow.trainers.building import (
    build_generator,
    build_roles,
    function_caller,
    heldout_sets,
    most_ranks_of_a_host,
    reencoders,
)
from hybridflow.trainers.environments import evaluation_notes, judge_of
from hybridflow.trainers.generating import overlapped_scoring, source_of, state_of_flows
from hybridflow.user_code import search_beside


class OnlineTrainer(loop.Trainer):
    """One config, ready to run. Building it is collective over the world and checks everything a user gave.

    watchdog: one that has not started, with the stop request of the process; without it signals end a run at once.
    replay: a run directory whose dumped batches take the engine's place, or one of them.
    rollout_only: generate and score, and train nothing.
    source: makes the source of rollouts when models and inputs are built. The trainer builds no engine.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        watchdog: Watchdog | None = None,
        *,
        replay: Path | None = None,
        rollout_only: bool = False,
        source: Callable[["OnlineTrainer"], Source] | None = None,
    ) -> None:
        if replay is not None and (rollout_only or source is not None):
            other = "rollout_only = True" if rollout_only else f"source = {source}"
            raise ConfigError(f"replay = {replay}, {other}: a replay generates nothing; give one of the two")
        files = None if replay is None else dumped_batches(replay)
        if files is not None and getattr(config.algorithm, "dynamic_sampling", None) is not None:
            raise ConfigError("algorithm.dynamic_sampling: a replay has one generation of a batch. Leave --replay out")
        self._generates, self._own_source = replay is None and source is None, source
        if config.rollout.max_staleness and (rollout_only or not self._generates):
            given = "--rollout-only" if rollout_only else "--replay" if source is None else "a source of your own"
            raise ConfigError(
                f"rollout.max_staleness = {config.rollout.max_staleness}: {given} trains nothing beside an engine. "
                "Set rollout.max_staleness=0"
            )
        config = config_for_inspection(config, replay=replay, rollout_only=rollout_only)
        self._looked_at_ends = False  # of the first iteration
        self.trains, self.writes_model = not rollout_only, replay is None and not rollout_only
        choose_platform(config.platform)  # before anything asks
        _, world_size = torchrun.torchrun_rank()
        self.config: ExperimentConfig = config
        self.placed: PlacedRun = place(config, world_size)
        check_hosts(self.placed, parse_hosts(torchrun.hosts_of_ranks()))
        self._flow = flow_of(config.algorithm)
        self.platform, self.watchdog = loop.start(config, watchdog)
        self.stop = self.watchdog.stop
        with self.watchdog.phase("start"):
            self._build(files)

    def _build(self, files: dict[int, Path] | None) -> None:
        """Inputs, models, engine: what takes long, and is collective over the world."""
        config = self.config
        vocab_size, group = self.placed.actor.spec.vocab_size, platforms.world_group()
        self.inputs: Inputs = load_inputs(config, vocab_size, num_ranks=most_ranks_of_a_host(), group=group)
        config = self.config = config.with_chat_template(self.inputs.chat_template)
        self.rendering = self.inputs.rendering.record
        digests = run_digests(config, self.inputs)
        check_agreement(digests, platforms.world_group())
        if self._generates:
            prepare_vllm()  # reports a missing vLLM before the models load
        watch, groups = Stopwatch.for_platform(self.platform), ProcessGroups()
        self.apart = apart = EnginesApart.of_run(self.placed, groups, self.platform)
        group = platforms.world_group() if apart is None or apart.trainers is None else apart.trainers
        self.exchange = Exchange(group, self.platform.device)
        self.caller = function_caller(config, self.inputs, group, calls=not self.serves)
        world = RunContext(
            self.platform,
            groups,
            self.exchange,
            self.placed.bucket_bytes,
            watch,
            with_engines=None if apart is None else apart.everyone,
            trainer_ranks=() if apart is None else apart.trainer_ranks,
        )
        self.roles = build_roles(self.placed, world, self.caller, reencoders(self.placed, self.inputs.decode))
        self._load_checkpoint(digests, group)
        self.replay = None if files is None else self.replay_of(files)
        if self._generates:
            self.generator = build_generator(self.placed, self.roles, self.inputs, world)
        if self.serves:
            self._build_engine_ranks(watch)
        else:
            self._build_run(world)
        self.platform.settle(expandable_segments=config.expandable_segments)

    @property
    def models_in_place(self) -> bool:
        """Whether the trained weights, and what was offloaded, are where training has left them."""
        return self.source.models_in_place

    @property
    def serves(self) -> bool:
        """Whether this rank trains nothing, and generates while others train."""
        return self.apart is not None and self.apart.serves

    def _load_checkpoint(self, digests: Mapping[str, bytes], group: dist.ProcessGroup) -> None:
        """Into the models, if there is one. Collective over the world. Errors: Stopped on all ranks or none."""
        if self.serves:
            platforms.fresh_store()  # as those who have a manager
            self._agree_to_start(None)
            return
        stopped: Stopped | None = None
        try:
            self.checkpoint_manager = loop.checkpoint_manager_of(
                self.config,
                digests,
                self.roles.roles_to_save(self.config.algorithm.kl),
                platform=self.platform,
                watchdog=self.watchdog,
                group=group,
                saves=self.writes_model,
                portable=self.roles.portable,
            )
        except Stopped as error:
            stopped = error
        self._agree_to_start(stopped)

    def _agree_to_start(self, stopped: Stopped | None) -> None:
        """Errors: Stopped, where the ranks that train were told to end before."""
        if stopped is not None and self.apart is None:
            raise stopped
        if self.apart is not None:
            ends = torch.tensor(int(stopped is not None), device=self.platform.device)
            if int(self.apart.everyone.maximum(ends)):
                raise stopped or Stopped("before this restart: it was told to end", saved=True)

    def _build_engine_ranks(self, watch: Stopwatch) -> None:
        """What serves on a rank that trains nothing."""
        assert self.apart is not None, "an engine on ranks of its own"
        self.engine_ranks = EngineRanks(
            self.config,
            self.generator,
            self.apart,
            draws=PromptDraws(self.config, self.inputs.train),
            sets=lambda iteration, whole: heldout_sets(self.config, self.inputs, iteration, whole=whole),
            look_at_inputs=lambda: self.inputs.understood(self.config),
            records=self._records,
            watchdog=self.watchdog,
            watch=watch,
        )

    def _build_run(self, world: RunContext) -> None:
        """What trains. Collective over the ranks that train."""
        config, watch = self.config, world.watch
        self.hooks = RunHooks(
            should_stop=self.checkpoint_manager.should_stop,
            save_rollout=self.checkpoint_manager.save_rollout,
            load_rollout=self._load_rollout,
            trace=stage_traces(config.metrics.profile, config.run_dir, self.platform.rank),
        )
        self.scoring = overlapped_scoring(self.placed, self.roles, world)
        self.source = self._shipped_source(world) if self._own_source is None else self._own_source(self)
        self.checkpoint_manager.add_source_state = partial(self.source.state, moment="after")
        self.book: OnlineBookkeeping = OnlineBookkeeping(
            config,
            self.roles,
            self.inputs.train,
            self.source,
            exchange=self.exchange,
            watch=watch,
            watchdog=self.watchdog,
            hooks=self.hooks,
            trains=self.trains,
        )
        self.run = Run(config, self.book, self.source)
        self.run.state = state_of_flows(self.checkpoint_manager, self._records) or self.run.state

    def _shipped_source(self, world: RunContext) -> Source:
        return source_of(
            self.config,
            self.generator if self.replay is None else self.replay,
            self.scoring,
            self.roles,
            apart=self.apart,
            manager=self.checkpoint_manager,
            draws=PromptDraws(self.config, self.inputs.train),
            stop=self.stop,
            world=world,
            hooks=self.hooks,
        )

    def _load_rollout(self, prompts: PromptBatch, iteration: int) -> RolloutBatch | None:
        """What an earlier start of the run has generated for the iteration in which it ended."""
        samples = self.config.sampling.samples

        def read(file: Path) -> tuple[RolloutBatch, Tensor | None]:
            return self.replay_of({iteration: file}).read(prompts, samples_per_prompt=samples, iteration=iteration)

        found = self.checkpoint_manager.load_rollout(iteration, read)
        return None if found is None else with_experts(*found, self._records, iteration)

    def replay_of(self, files: Mapping[int, Path]) -> Replay:
        """What reads rollouts of this run from files of batches, by iteration."""
        environment = self.config.data.environment
        return Replay(
            files,
            vocab_size=self.placed.actor.spec.vocab_size,
            max_length=self.config.max_sequence_length,
            records=self._records,
            num_rewards=0 if environment is None else len(environment.weights),
            several=environment is not None and environment.several,
        )

    @property
    def _records(self) -> RoutingRecords | None:
        """Of the engine's experts, where the actor replays them."""
        return None if self.roles.actor is None else self.roles.actor.records

    @classmethod
    def from_yaml(cls, path: str, overrides: list[str] | tuple[str, ...] = ()) -> Self:
        """The trainer of a config file, `auto` resolved; a user's functions may lie beside it."""
        search_beside(path)
        return cls(read_for_run(ExperimentConfig, path, overrides))

    def fit(self, num_iterations: int | None = None) -> RunSummary:
        """Train up to iteration `num_iterations` (default: the config's) and write the run directory.

        Ends with runs/NAME/hf, except for a replay and for rollouts alone. Errors: Stopped after a request to end and
        a save. A rank that trains nothing serves until the run ends, and knows no summary.
        """
        if self.serves:
            self.engine_ranks.serve()
            return RunSummary.unknown()
        last = self.config.num_iterations if num_iterations is None else num_iterations
        try:
            summary = self.train(last, self.inputs.decode)
        except Stopped as stopped:
            self.source.close(saved=stopped.saved)
            raise
        self.source.close(saved=None)
        return summary

    def flow(self, run: Run) -> RolloutBatch:
        """See `Trainer`."""
        return self._flow(run)

    def start_lines(self, recorder: Recorder, last: int) -> list[str]:
        """See `Trainer`."""
        of_source = self.source.begin_run()
        layouts = {name: model.layout for name, model in self.placed.models.items()}
        cache = self.generator.cache_report() if self._generates else None
        recorder.layout(self.placed.world_size, layouts, self.placed.rollout, cache)
        understood = self.inputs.understood(self.config)
        return [*self.checkpoint_manager.notes, *self.inputs.notes(), *understood, *of_source, *self._notes(last)]

    def model_to_export(self) -> tuple[TrainedRole, Sequence[int]]:
        """See `Trainer`."""
        return self.run.actor, self.inputs.ends.ids

    def remaining_iterations(self, last: int) -> Sequence[int]:
        """See `Trainer`: of a replay, those that there is a file of."""
        if self.replay is None:
            return super().remaining_iterations(last)
        return self.replay.iterations(last, after=self.run.state.iteration)

    def state_to_save(self, state: RunState, moment: Moment) -> RunState:
        """See `Trainer`."""
        return self.source.state(state, moment)

    def iterate(self, iteration: int, last: int, recorder: Recorder) -> Iteration | None:
        """See `Trainer`."""
        self.book.skip_to(self.run, iteration)
        self.caller.context.iteration = iteration
        done = super().iterate(iteration, last, recorder)
        if done is None:
            return None
        if not self._looked_at_ends:
            self._looked_at_ends = True
            if done.batch.truncated.all():
                recorder.message(self.inputs.all_cut(self.config.sampling, done.number, len(done.batch)))
        for line in [] if self.replay is None else self.replay.comparison_lines(iteration, done.batch.tensors()):
            recorder.message(line)
        return done

    def evaluate(self, *, whole: bool = True) -> dict[str, float]:
        """Responses to the held-out prompts: how many are right, and their mean score.

        whole: on all sets; else on those whose turn it is.
        """
        if not self.inputs.heldout:
            raise ConfigError("data.heldout = null: evaluate() needs held-out prompts")
        judge, metrics = judge_of(self.config, self.caller), dict[str, float]()
        with self.watchdog.phase("evaluate"), self.caller.evaluating():
            iteration = self.run.state.iteration
            sets = partial(heldout_sets, self.config, self.inputs, iteration, whole=whole)
            for heldout, responses in self.source.evaluate(iteration, sets, whole=whole):
                found = evaluate(
                    heldout,
                    responses,
                    judge,
                    caller=self.caller,
                    scorer=self.roles.scorer,
                    exchange=self.exchange,
                )
                self.hooks.heldout(iteration, heldout.name, heldout.prompts, responses, found.marks)
                metrics |= found.metrics()
        return metrics

    def _notes(self, num_iterations: int) -> list[str]:
        """What the user should know of the choices that were made."""
        notes = [*staleness_notes(self.config), *loop.start_notes(self.placed)]
        if self.trains:
            notes += loop.warmup_notes(self.config, num_iterations)
        notes += evaluation_notes(self.config)
        again = getattr(self.config.algorithm, "dynamic_sampling", None) is not None  # it may draw several times
        drawn = num_iterations * self.config.data.prompts_per_iteration
        notes += mixture_lines("data.train", self.inputs.train.rows, drawn, at_least=again)
        if not self.trains:
            notes.append("rollout only: nothing is trained, and no model is written")
        return notes + loop.sampling_notes(self.config.sampling.changed_distribution())


def config_for_inspection(config: ExperimentConfig, *, replay: Path | None, rollout_only: bool) -> ExperimentConfig:
    """The config of a replay or of rollouts alone. A new directory leaves the other run's directory as it is. The run
    begins with the given models or checkpoint, and never resumes a former replay."""
    metrics: dict[str, Any] = {}
    if replay is not None:
        metrics["eval_interval"] = 0  # which takes an engine
    if rollout_only:
        metrics["dump_batches"] = True
    if not metrics:
        return config
    checkpoint: dict[str, Any] = {"save_interval": 0, "save_minutes": None}
    if config.checkpoint.load == "auto":
        checkpoint["load"] = "none"
    return config.model_copy(
        update={
            "name": f"{config.name}-{'rollout' if rollout_only else 'replay'}",
            "stop_when": None,
            "metrics": config.metrics.model_copy(update=metrics),
            "checkpoint": config.checkpoint.model_copy(update=checkpoint),
        }
    )
