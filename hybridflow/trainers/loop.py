"""The loop of a run: every rank evaluates, runs the flow, records, saves. A flow (`hybridflow.flows`) is an iteration.

`hybridflow.trainers.online` and `hybridflow.trainers.fixed_data` build what the loop runs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hybridflow.batch import RolloutBatch
from hybridflow.checkpoint.export import export_huggingface
from hybridflow.checkpoint.manager import CheckpointManager
from hybridflow.checkpoint.sharded import SavedRole
from hybridflow.checkpoint.state import RunState
from hybridflow.config import RunConfig, TrainedRoleConfig
from hybridflow.config.algorithms import PPO
from hybridflow.config.kinds import AnyConfig
from hybridflow.errors import ConfigError, NonFiniteError, Stopped
from hybridflow.flows.bookkeeping import Bookkeeping
from hybridflow.flows.generation import Moment
from hybridflow.flows.hooks import RunHooks
from hybridflow.flows.run import Run
from hybridflow.flows.step_metrics import NonFinite
from hybridflow.formats.weights_digest import base_digest
from hybridflow.models.kernels import kernel_facts, kernel_line
from hybridflow.parallel import platform as platforms
from hybridflow.parallel import torchrun
from hybridflow.parallel.platform import Platform
from hybridflow.parallel.proxies import keep_loopback_direct
from hybridflow.parallel.stop import StopRequest
from hybridflow.parallel.streams import escape_letters
from hybridflow.parallel.versions import set_line
from hybridflow.parallel.watchdog import Watchdog
from hybridflow.placement.adapter_lines import adapter_lines
from hybridflow.placement.placed import PlacedModels
from hybridflow.recording.iteration import Iteration, Metrics
from hybridflow.recording.recorder import Recorder, RunSummary
from hybridflow.roles.base import TrainedRole


def start(config: RunConfig, watchdog: Watchdog | None) -> tuple[Platform, Watchdog]:
    """The ranks find each other, and the watchdog, one that has not started or a new one, begins. Collective."""
    escape_letters()
    keep_loopback_direct()
    deadlines = config.watchdog.deadlines()
    shares = [role.context_parallel_size * role.expert_parallel_size > 1 for role in config.roles().values()]
    longest = max(deadlines.values())
    platform = platforms.start(config.seed, config.platform, longest_phase_seconds=longest, many_groups=any(shares))
    if watchdog is None:
        watchdog = Watchdog(deadlines, StopRequest(config.checkpoint.grace_seconds, signals=()))
    watchdog.start(platforms.world_group(), config.run_dir / "logs")
    return platform, watchdog


def checkpoint_manager_of(
    config: AnyConfig,
    digests: Mapping[str, bytes],
    roles: Sequence[SavedRole],
    *,
    platform: Platform,
    watchdog: Watchdog,
    group: dist.ProcessGroup | None = None,
    saves: bool = True,
    portable: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict,
) -> CheckpointManager:
    """Collective over `group`, the ranks that train. A checkpoint, if there is one, is loaded into the models."""
    return CheckpointManager(
        config,
        digests,
        roles,
        platform=platform,
        group=group or platforms.world_group(),
        store=platforms.fresh_store(),
        watchdog=watchdog,
        restarts=torchrun.restart_count(),
        saves=saves,
        portable=portable,
    )


class Trainer(ABC):
    """One config, ready to run: what trainers of both kinds do alike. A trainer builds the fields.

    run: what a flow is given. book: what is done with an iteration beside the flow. rendering: the record of how rows
    become text.
    """

    config: RunConfig
    placed: PlacedModels
    watchdog: Watchdog
    checkpoint_manager: CheckpointManager
    hooks: RunHooks
    book: Bookkeeping
    run: Run
    rendering: Mapping[str, Any]
    writes_model = True

    @property
    def models_in_place(self) -> bool:
        """Whether the trained weights, and what was offloaded, are where training has left them."""
        return True

    @abstractmethod
    def flow(self, run: Run) -> RolloutBatch:
        """What an iteration is: the algorithm."""

    @abstractmethod
    def evaluate(self, *, whole: bool = True) -> dict[str, float]:
        """Metrics of held-out rows. whole: of all sets; else of those whose turn it is. Collective."""

    @abstractmethod
    def start_lines(self, recorder: Recorder, last: int) -> list[str]:
        """Record the layout; the lines that a person reads as the run begins. Collective."""

    @abstractmethod
    def model_to_export(self) -> tuple[TrainedRole, Sequence[int]]:
        """The model to write at the end, and ids of its end tokens."""

    def remaining_iterations(self, last: int) -> Sequence[int]:
        """The iterations of this start."""
        return range(self.run.state.iteration + 1, last + 1)

    def state_to_save(self, state: RunState, moment: Moment) -> RunState:
        """The state before an iteration that ends early, with what a save has beside it: see `flows.generation`."""
        return state

    # ---- a run

    def train(self, last: int, decode: Callable[[list[int]], str]) -> RunSummary:
        """Up to iteration `last`, into the run directory, and with hf/ at the end. Collective.

        Errors: ConfigError; Stopped after a request to end and a save.
        """
        if last < 1:
            raise ConfigError(f"num_iterations = {last}: a run has at least one iteration")
        manager = self.checkpoint_manager
        with manager.recorder(last, decode) as recorder:
            for line in self.start_lines(recorder, last):
                recorder.message(line)
            if self.run.state.iteration >= last:
                recorder.message(f"all {last} iterations are done; checkpoint.load=none starts anew")
            if self.config.metrics.eval_interval and manager.state is None:
                recorder.phase("evaluating before training")
                self.hooks.heldout = recorder.heldout
                recorder.before_training(self.evaluate())
            self._iterate_all(last, recorder)
            manager.finish()
            if self.writes_model:
                self._export(recorder)
        return recorder.summary()

    def _export(self, recorder: Recorder) -> None:
        manager, directory, (role, end_token_ids) = self.checkpoint_manager, self.config.run_dir, self.model_to_export()
        recorder.phase(f"writing the trained {'model' if role.name == 'reward_model' else role.name}")
        with self.watchdog.phase("save"), manager.save_on_error(self.run.state, recorder):
            export_huggingface(
                role,
                directory / "hf",
                adapter=directory / "adapter",
                base_digest=base_digest(manager.digests, role.name),
                end_token_ids=end_token_ids,
                group=self.book.exchange.group,
                rendering=self.rendering,
                report=recorder.message,
            )

    def _iterate_all(self, last: int, recorder: Recorder) -> None:
        """Iterate, evaluate where it is time to, record and save, until all is done or `stop_when` holds."""
        manager = self.checkpoint_manager
        over = manager.loaded_stop_reason()
        if over is not None:
            recorder.message(f"the run is over: {over}; without stop_when the run continues")
            return
        for iteration in self.remaining_iterations(last):
            metrics, why = self._recorded(self.iterate(iteration, last, recorder), iteration, last, recorder)
            ends = iteration == last or why is not None
            manager.after_iteration(self.run.state, metrics, recorder, is_last=ends)
            if why is not None:
                recorder.message(f"iteration {iteration} of {last} was the last: {why}")
                return

    def _recorded(
        self, done: Iteration | None, iteration: int, last: int, recorder: Recorder
    ) -> tuple[Metrics, str | None]:
        """The iteration's metrics (none without a step), and why `stop_when` makes the iteration the last one."""
        if done is None:
            return {}, None
        interval, manager = self.config.metrics.eval_interval, self.checkpoint_manager
        why = manager.stop_reason(done.metrics, recorder)
        if evaluates(interval, iteration, last) or (interval and why is not None):
            recorder.phase(f"iteration {iteration}: evaluating")
            try:
                evaluation = self.evaluate(whole=iteration == last or why is not None)
            except Exception as error:
                if self.models_in_place:
                    state = partial(self._state_recorded, done, recorder)
                    manager.save_after_error(error, iteration, state, recorder, done.metrics)
                raise
            recorder.evaluated(done, evaluation)
            why = why or manager.stop_reason(done.metrics, recorder)
        done.metrics["time/save_seconds"] = manager.pop_save_seconds()
        recorder.iteration(done)
        return done.metrics, why

    def _state_recorded(self, done: Iteration, recorder: Recorder) -> RunState:
        """The state after an iteration, whose row has no evaluation."""
        recorder.iteration(done)
        return self.run.state

    # ---- an iteration

    def iterate(self, iteration: int, last: int, recorder: Recorder) -> Iteration | None:
        """Run one iteration of the flow; None where a number was not finite and `nonfinite` lets the run go on.

        Errors: Stopped after a request to end and a save; NonFinite where `nonfinite` ends the run.
        """
        before, book = self.run.state, self.book
        self.hooks.say, self.hooks.show, self.hooks.heldout = recorder.message, recorder.phase, recorder.heldout
        book.begin(self.run, iteration, last)
        try:
            done = book.finished(self.run, self.flow(self.run))
        except Stopped as stopped:
            book.abandon(self.run, before)
            self.checkpoint_manager.save_and_stop(self.state_to_save(before, "stopped"), recorder, stopped)
        except NonFinite as found:
            found.tensors = dict(book.roles.portable(found.tensors))
            self.run.state = self._lost(self.run.state, found, recorder)
            return None
        except Exception as error:
            if self.models_in_place and not book.steps_begun:
                book.abandon(self.run, before)
                kept = partial(self.state_to_save, before, "failed")
                self.checkpoint_manager.save_after_error(error, before.iteration, kept, recorder)
            raise
        finally:
            self.watchdog.rest()
        self.run.state = replace(self.run.state, nonfinite_in_a_row=0)
        return done

    def _lost(self, state: RunState, found: NonFinite, recorder: Recorder) -> RunState:
        """Keep what was computed in the iteration of `state`, which loses a step; the state after it.

        Every rank that trains has found the same. Errors: NonFiniteError unless the config lets the run go on.
        """
        rules, in_a_row, iteration = self.config.nonfinite, state.nonfinite_in_a_row + 1, state.iteration
        recorder.lost(iteration, str(found), found.tensors)
        dist.barrier(group=self.book.exchange.group)  # the first rank to leave ends the others
        if rules.action == "stop" or in_a_row > rules.max_in_a_row:
            rule = "nonfinite.action = stop"
            if rules.action == "skip":
                rule = f"{in_a_row} iterations in a row, nonfinite.max_in_a_row = {rules.max_in_a_row}"
            raise NonFiniteError(f"iteration {iteration}: {found} ({rule})") from found
        return replace(state, nonfinite_in_a_row=in_a_row)


def evaluates(interval: int, iteration: int, num_iterations: int) -> bool:
    """Every so many iterations, and at the end; 0: never."""
    return interval > 0 and (iteration % interval == 0 or iteration == num_iterations)


def start_notes(placed: PlacedModels) -> list[str]:
    """Which releases are installed, which kernels the models take, and which models have adapters."""
    return [set_line(), _kernels(placed.config), *adapter_lines(placed)]


def warmup_notes(config: AnyConfig, num_iterations: int) -> list[str]:
    """Warnings on warm-ups of a learning rate or of the critic that the run is too short for."""
    notes, run = [], f"the run has {num_iterations} iteration{'s' * (num_iterations > 1)}"
    for name, role in config.roles().items():
        optimizer = role.optimizer if isinstance(role, TrainedRoleConfig) else None
        if optimizer is not None and optimizer.lr and optimizer.warmup_iterations > num_iterations:
            share = num_iterations / optimizer.warmup_iterations
            notes.append(
                f"warning: {name}.optimizer.warmup_iterations = {optimizer.warmup_iterations}: {run}. The learning "
                f"rate ends at {share:.2g} of lr = {optimizer.lr:g}"
            )
    algorithm = config.algorithm
    if isinstance(algorithm, PPO) and algorithm.critic_warmup_iterations >= num_iterations:
        notes.append(
            f"warning: algorithm.critic_warmup_iterations = {algorithm.critic_warmup_iterations}: {run}. The critic "
            "alone is trained, the actor never"
        )
    return notes


def sampling_notes(changed: Sequence[str]) -> list[str]:
    """changed: keys of sampling by which the engine does not draw from the whole softmax."""
    if not changed:
        return []
    return [
        f"{', '.join(changed)}: the engine's log-probs belong to its sampling distribution, the trainer's to the whole "
        "softmax. rollout/log_prob_diff_* and gen_kl include this difference"
    ]


def _kernels(config: RunConfig) -> str:
    on_cpu = platforms.kernel_line()
    if on_cpu is not None:
        return on_cpu
    roles = config.roles()
    adam = any(isinstance(role, TrainedRoleConfig) and role.optimizer.name == "adam" for role in roles.values())
    fused = [name for name, role in roles.items() if role.megatron_arguments.attention_backend == "fused"]
    sending = {name: role.token_dispatcher for name, role in roles.items() if role.dense_per_expert_copy > 1}
    dtypes = {name: role.dtype for name, role in roles.items()}
    return kernel_line(kernel_facts(), dtypes, adam=adam, fused=fused, sending=sending)
