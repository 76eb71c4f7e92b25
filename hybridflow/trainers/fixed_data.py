"""Training on the rows of files: every rank draws rows, judges them, steps, records. No engine is built.

trainer = FixedDataTrainer.from_yaml("configs/quickstart_sft.yaml", ["seed=3"])
trainer.fit()
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from hybridflow.batch import RolloutBatch
from hybridflow.checkpoint.manager import CheckpointManager
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.data.digests import run_digests
from hybridflow.data.fixed_inputs import FixedInputs, load_fixed_inputs
from hybridflow.data.row_notes import mixture_lines
from hybridflow.errors import ConfigError
from hybridflow.flows.bookkeeping import FixedDataBookkeeping
from hybridflow.flows.fixed import evaluate_fixed, fixed_flow
from hybridflow.flows.hooks import RunHooks
from hybridflow.flows.models import Roles
from hybridflow.flows.run import Run
from hybridflow.parallel import platform as platforms
from hybridflow.parallel import torchrun
from hybridflow.parallel.agreement import check_agreement
from hybridflow.parallel.device import choose_platform
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.parallel.watchdog import Watchdog
from hybridflow.placement.hosts import check_hosts, parse_hosts
from hybridflow.placement.placed import PlacedModels, place
from hybridflow.recording.measure import Stopwatch
from hybridflow.recording.recorder import Recorder, RunSummary
from hybridflow.recording.traces import stage_traces
from hybridflow.roles.base import RunContext, TrainedRole
from hybridflow.roles.policy import Actor, ActorAsReference, Reference
from hybridflow.roles.values import TrainedRewardModel
from hybridflow.roles.warm_up import warm_up
from hybridflow.trainers.auto import read_for_run
from hybridflow.trainers.loop import Trainer, checkpoint_manager_of, start, start_notes, warmup_notes


def build_models(placed: PlacedModels, world: RunContext) -> Roles:
    """The models of the run, those that it has. Collective over the world."""
    models = placed.models
    actor = Actor(models["actor"], temperature=1.0, world=world) if "actor" in models else None
    reference = None
    if "reference" in models:
        reference = Reference(models["reference"], temperature=1.0, world=world)
    elif actor is not None and placed.config.reference_is_base:
        reference = ActorAsReference(actor, world=world, keeps=placed.begins_with_adapters)
    reward_model = None
    if "reward_model" in models:
        reward_model = TrainedRewardModel(models["reward_model"], world=world, head_seed=placed.config.seed)
    return Roles(actor, reference=reference, reward_model=reward_model)


class FixedDataTrainer(Trainer):
    """One config, ready to run. Building it is collective over the world and checks everything a user gave.

    watchdog: one that has not started, with the stop request of the process; without it signals end a run at once.
    """

    def __init__(self, config: FixedDataConfig, watchdog: Watchdog | None = None) -> None:
        choose_platform(config.platform)  # before anything asks
        _, world_size = torchrun.torchrun_rank()
        self.config: FixedDataConfig = config
        self.placed: PlacedModels = place(config, world_size)
        check_hosts(self.placed, parse_hosts(torchrun.hosts_of_ranks()))
        self.platform, self.watchdog = start(config, watchdog)
        with self.watchdog.phase("start"):
            self._build()

    def _build(self) -> None:
        """Inputs and models: what takes long, and is collective over the world."""
        config, platform = self.config, self.platform
        self.inputs: FixedInputs = load_fixed_inputs(config, self.placed.trained.spec.vocab_size)
        self.rendering = self.inputs.rendering.record
        self.num_iterations = config.iterations(len(self.inputs.train))
        digests = run_digests(config, self.inputs)
        check_agreement(digests, platforms.world_group())
        exchange = Exchange(platforms.world_group(), platform.device)
        watch, groups = Stopwatch.for_platform(platform), ProcessGroups()
        self.models = build_models(self.placed, RunContext(platform, groups, exchange, self.placed.bucket_bytes, watch))
        warm_up(self.placed, groups, platform.device)
        self.checkpoint_manager: CheckpointManager = checkpoint_manager_of(
            config, digests, self.models.trained(), platform=platform, watchdog=self.watchdog
        )
        self.hooks = RunHooks(
            should_stop=self.checkpoint_manager.should_stop,
            decode=self.inputs.decode,
            trace=stage_traces(config.metrics.profile, config.run_dir, platform.rank),
        )
        self.book = FixedDataBookkeeping(
            config,
            self.models,
            self.inputs.train,
            exchange=exchange,
            watch=watch,
            watchdog=self.watchdog,
            hooks=self.hooks,
        )
        self.run = Run(config, self.book)
        self.run.state = self.checkpoint_manager.state or self.run.state
        platform.settle(expandable_segments=config.expandable_segments)

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Self:
        """The trainer of a config file, `auto` resolved."""
        return cls(read_for_run(FixedDataConfig, path, overrides))

    def fit(self, num_iterations: int | None = None) -> RunSummary:
        """Train up to iteration `num_iterations` (default: the config's) and write the run directory.

        Ends with runs/NAME/hf. Errors: Stopped after a request to end and a save.
        """
        return self.train(self.num_iterations if num_iterations is None else num_iterations, self.inputs.decode)

    def flow(self, run: Run) -> RolloutBatch:
        """See `Trainer`."""
        return fixed_flow(run, self.config.algorithm)

    def start_lines(self, recorder: Recorder, last: int) -> list[str]:
        """See `Trainer`."""
        layouts = {name: model.layout for name, model in self.placed.models.items()}
        recorder.layout(self.placed.world_size, layouts, None)
        understood = self.inputs.understood(self.config)
        return [*self.checkpoint_manager.notes, *self.inputs.notes(), *understood, *self._notes(last)]

    def model_to_export(self) -> tuple[TrainedRole, Sequence[int]]:
        """See `Trainer`."""
        return self.models.trained()[0], self._end_token_ids()

    def _end_token_ids(self) -> tuple[int, ...]:
        """Those of a model that generates; a reward model is exported as it was."""
        if self.config.actor is None:
            return ()
        return self.inputs.end_token_ids(self.config, self.placed.trained.spec.vocab_size)

    def evaluate(self, *, whole: bool = True) -> dict[str, float]:
        """The loss of the held-out rows and, of pairs, how many are the right way round and by how much."""
        heldout = self.inputs.heldout
        if heldout is None:
            raise ConfigError("data.heldout = null: evaluate() needs held-out rows")
        with self.watchdog.phase("evaluate"):
            examples = heldout.examples(range(len(heldout)))
            return evaluate_fixed(self.run, self.config.algorithm, examples, self.config.data.batch_size)

    def _notes(self, last: int) -> list[str]:
        """What the user should know of the choices that were made."""
        notes = [*start_notes(self.placed), *warmup_notes(self.config, last)]
        notes += mixture_lines("data.train", self.inputs.train.rows, last * self.config.data.batch_size)
        epochs, rows = self.config.num_epochs, len(self.inputs.train)
        if epochs is not None:
            batch = self.config.data.batch_size
            left_out = epochs * rows - self.num_iterations * batch
            rest = f", which leaves out the last {left_out}" if left_out else ""
            notes.append(
                f"{epochs} x {rows} rows of data.train in batches of {batch}: {self.num_iterations} iterations{rest}"
            )
        return notes
