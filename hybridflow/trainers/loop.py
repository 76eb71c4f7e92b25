"""What the loop of every trainer does alike: it starts a platform, keeps checkpoints, and loses a step to a NaN.

`hybridflow.trainers.online` and `hybridflow.trainers.fixed_data` are built on it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from hybridflow.checkpoint.manager import CheckpointManager
from hybridflow.checkpoint.sharded import SavedRole
from hybridflow.checkpoint.state import RunState
from hybridflow.config import ExperimentConfig, RunConfig, TrainedRoleConfig
from hybridflow.config.algorithms import PPO
from hybridflow.errors import NonFiniteError
from hybridflow.flows.bookkeeping import Bookkeeping
from hybridflow.flows.finite import NonFinite
from hybridflow.flows.run import Run
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
from hybridflow.recording.recorder import Recorder


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
    config: RunConfig,
    digests: Mapping[str, bytes],
    roles: Sequence[SavedRole],
    *,
    platform: Platform,
    watchdog: Watchdog,
    group: dist.ProcessGroup | None = None,
    saves: bool = True,
    portable: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict,
) -> CheckpointManager:
    """Collective over the world, whose part `group` trains: it loads a checkpoint into the models, if there is one."""
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


class Trainer(Protocol):
    """What the loop asks of a trainer."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def checkpoint_manager(self) -> CheckpointManager: ...
    @property
    def run(self) -> Run: ...
    @property
    def book(self) -> Bookkeeping: ...
    @property
    def models_in_place(self) -> bool: ...
    def iterate(self, iteration: int, last: int, recorder: Recorder, /) -> Iteration | None: ...
    def evaluate(self, *, whole: bool) -> dict[str, float]: ...


def train(trainer: Trainer, iterations: Iterable[int], last: int, recorder: Recorder) -> None:
    """Iterate, evaluate where it is time to, record and save, until all is done or `stop_when` holds. Collective.

    last: the run's last iteration. Errors: Stopped after a request to end and a save; SaveError.
    """
    checkpoint_manager = trainer.checkpoint_manager
    over = checkpoint_manager.loaded_stop_reason()
    if over is not None:
        recorder.message(f"the run is over: {over}; without stop_when the run continues")
        return
    for iteration in iterations:
        metrics, why = _recorded(trainer, trainer.iterate(iteration, last, recorder), iteration, last, recorder)
        checkpoint_manager.after_iteration(
            trainer.run.state, metrics, recorder, is_last=iteration == last or why is not None
        )
        if why is not None:
            recorder.message(f"iteration {iteration} of {last} was the last: {why}")
            return


def _recorded(
    trainer: Trainer, done: Iteration | None, iteration: int, last: int, recorder: Recorder
) -> tuple[Metrics, str | None]:
    """The iteration's metrics (none without a step), and why `stop_when` makes the iteration the last one."""
    if done is None:
        return {}, None
    interval = trainer.config.metrics.eval_interval
    why = trainer.checkpoint_manager.stop_reason(done.metrics, recorder)
    if evaluates(interval, iteration, last) or (interval and why is not None):
        recorder.phase(f"iteration {iteration}: evaluating")
        try:
            evaluation = trainer.evaluate(whole=iteration == last or why is not None)
        except Exception as error:
            if trainer.models_in_place:
                state = partial(_state_recorded, trainer, done, recorder)
                trainer.checkpoint_manager.save_before(error, iteration, state, recorder, done.metrics)
            raise
        recorder.evaluated(done, evaluation)
        why = why or trainer.checkpoint_manager.stop_reason(done.metrics, recorder)
    done.metrics["time/save_seconds"] = trainer.checkpoint_manager.pop_save_seconds()
    recorder.iteration(done)
    return done.metrics, why


def _state_recorded(trainer: Trainer, done: Iteration, recorder: Recorder) -> RunState:
    """The state after an iteration, whose row has no evaluation."""
    recorder.iteration(done)
    return trainer.run.state


def lost(
    config: RunConfig,
    state: RunState,
    found: NonFinite,
    recorder: Recorder,
    group: dist.ProcessGroup | None = None,
) -> RunState:
    """Keep what was computed in the iteration of `state`, which loses a step; the state after it.

    Every rank of the group (None: of the world) has found the same. Errors: NonFiniteError unless the config lets the
    run go on.
    """
    rules, in_a_row, iteration = config.nonfinite, state.nonfinite_in_a_row + 1, state.iteration
    recorder.lost(iteration, str(found), found.tensors)
    dist.barrier(group=group or dist.group.WORLD)  # the first rank to leave ends the others
    if rules.action == "stop" or in_a_row > rules.max_in_a_row:
        rule = "nonfinite.action = stop"
        if rules.action == "skip":
            rule = f"{in_a_row} iterations in a row, nonfinite.max_in_a_row = {rules.max_in_a_row}"
        raise NonFiniteError(f"iteration {iteration}: {found} ({rule})") from found
    return replace(state, nonfinite_in_a_row=in_a_row)


def save_whole(
    trainer: Trainer, error: Exception, before: RunState, kept: Callable[[RunState], RunState], recorder: Recorder
) -> None:
    """The iteration ends with this error: save the one before, unless the models are not as that one left them.

    before: the state of the one before. kept: adds what a save has beside, a call that is collective.
    """
    if trainer.models_in_place and not trainer.book.steps_begun:
        trainer.book.abandon(trainer.run, before)
        trainer.checkpoint_manager.save_before(error, before.iteration, lambda: kept(before), recorder)


def evaluates(interval: int, iteration: int, num_iterations: int) -> bool:
    """Every so many iterations, and at the end; 0: never."""
    return interval > 0 and (iteration % interval == 0 or iteration == num_iterations)


def start_notes(placed: PlacedModels) -> list[str]:
    """Which releases are installed, which kernels the models take, and which models have adapters."""
    return [set_line(), _kernels(placed.config), *adapter_lines(placed)]


def warmup_notes(config: RunConfig, num_iterations: int) -> list[str]:
    """What warm-ups that are longer than the run come to."""
    notes, run = [], f"the run has {num_iterations} iteration{'s' * (num_iterations > 1)}"
    for name, role in config.roles().items():
        optimizer = role.optimizer if isinstance(role, TrainedRoleConfig) else None
        if optimizer is not None and optimizer.lr and optimizer.warmup_iterations > num_iterations:
            share = num_iterations / optimizer.warmup_iterations
            notes.append(
                f"warning: {name}.optimizer.warmup_iterations = {optimizer.warmup_iterations}: {run}. The learning "
                f"rate ends at {share:.2g} of lr = {optimizer.lr:g}"
            )
    algorithm = config.algorithm if isinstance(config, ExperimentConfig) else None
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
    sending = {name: role.token_dispatcher for name, role in roles.items() if role.replicas_per_expert_copy > 1}
    dtypes = {name: role.dtype for name, role in roles.items()}
    return kernel_line(kernel_facts(), dtypes, adam=adam, fused=fused, sending=sending)
