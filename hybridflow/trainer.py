"""The loop: every rank evaluates, runs the flow, records. A flow (`hybridflow.flows`) owns what an iteration is.

Every rank runs this same program over the same global batch; the roles shard the work. Start it under torchrun:

    trainer = RLTrainer.from_yaml("configs/quickstart.yaml", ["seed=3"])
    trainer.fit()
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from hybridflow.batch import RolloutBatch
from hybridflow.checkpoint.export import export_huggingface
from hybridflow.config import GRPO, PPO, AlgorithmConfig, Custom, ExperimentConfig
from hybridflow.data.digests import run_digests
from hybridflow.data.inputs import Inputs, load_inputs
from hybridflow.errors import ConfigError, NonFiniteError
from hybridflow.flows.custom import custom_flow
from hybridflow.flows.evaluate import evaluate
from hybridflow.flows.finite import NonFinite
from hybridflow.flows.grpo import grpo
from hybridflow.flows.models import Roles, training_memory_offloaded
from hybridflow.flows.ppo import ppo
from hybridflow.flows.replay import Replay, dumped_batches
from hybridflow.flows.run import Run
from hybridflow.generator import Generator
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.agreement import check_agreement
from hybridflow.parallel.device import choose_platform
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.planning.placed import PlacedRun, place
from hybridflow.recording.iteration import Iteration
from hybridflow.recording.measure import Stopwatch
from hybridflow.recording.recorder import Recorder, RunSummary, record_run
from hybridflow.rewards.scorer import FunctionCaller, Scorer
from hybridflow.roles.base import World
from hybridflow.roles.policy import Actor, Reference
from hybridflow.roles.values import Critic, RewardModel
from hybridflow.rollout.patches import prepare_vllm
from hybridflow.user_code import search_beside

Flow = Callable[[Run], RolloutBatch]


def flow_of(algorithm: AlgorithmConfig) -> Flow:
    """The function that runs an iteration of the algorithm."""
    match algorithm:
        case PPO():
            return lambda run: ppo(run, algorithm)
        case GRPO():
            return lambda run: grpo(run, algorithm)
        case Custom():
            return custom_flow(algorithm)


def build_roles(placed: PlacedRun, world: World, caller: FunctionCaller) -> Roles:
    """The models of the run, those that it has. Collective over the world."""
    config, models, temperature = placed.config, placed.models, placed.config.sampling.temperature
    actor = Actor(placed.actor, temperature=temperature, world=world)
    critic = Critic(models["critic"], world=world) if "critic" in models else None
    reference = None
    if "reference" in models:
        reference = Reference(models["reference"], temperature=temperature, world=world)
    scorer = None
    if config.reward is not None:
        rewards = [RewardModel(model, world=world) for model in placed.reward_models]
        scorer = Scorer(config.reward, rewards, caller=caller, watch=world.watch)
    return Roles(actor, critic, reference, scorer)


def renamed(config: ExperimentConfig, *, replay: Path | None, rollout_only: bool) -> ExperimentConfig:
    """The config of a run that looks into another: it has a directory of its own, so that the other's stays, and begins
    with the models or the checkpoint that it is given, never where it was itself."""
    metrics: dict[str, Any] = {}
    if replay is not None:
        metrics["eval_interval"] = 0  # which takes an engine
    if rollout_only:
        metrics["dump_batches"] = True
    if not metrics:
        return config
    checkpoint: dict[str, Any] = {"save_interval": 0}
    if config.checkpoint.load == "auto":
        checkpoint["load"] = "none"
    return config.model_copy(
        update={
            "name": f"{config.name}-{'rollout' if rollout_only else 'replay'}",
            "metrics": config.metrics.model_copy(update=metrics),
            "checkpoint": config.checkpoint.model_copy(update=checkpoint),
        }
    )


class RLTrainer:
    """One config, ready to run. Building it is collective over the world and checks everything a user gave.

    replay: a run directory whose dumped batches take the engine's place, or one of them.
    rollout_only: generate and score, and train nothing.
    """

    def __init__(self, config: ExperimentConfig, *, replay: Path | None = None, rollout_only: bool = False) -> None:
        assert replay is None or not rollout_only, "a replay does not generate"
        files = dumped_batches(replay) if replay is not None else {}
        config = renamed(config, replay=replay, rollout_only=rollout_only)
        self.writes_model = replay is None and not rollout_only
        choose_platform(config.platform)  # before anything asks
        _, world_size = platforms.torchrun_rank()
        self.config, self.placed = config, place(config, world_size)
        self.flow = flow_of(config.algorithm)
        self.platform = platforms.start(config.seed, config.platform)
        self.inputs: Inputs = load_inputs(config, self.placed.actor.spec.vocab_size)
        check_agreement(run_digests(config, self.inputs), platforms.world_group())
        if replay is None:
            prepare_vllm()  # a missing vLLM is told before the models load
        self.exchange = Exchange(platforms.world_group(), self.platform.device)
        watch = Stopwatch(self.platform.synchronize)
        self.caller = FunctionCaller(self.inputs.decode, self.platform.rank, self.platform.world_size)
        bucket_bytes = config.rollout.bucket_bytes(cuda=self.platform.has_cuda)
        world = World(self.platform, ProcessGroups(), self.exchange, bucket_bytes, watch)
        self.roles = build_roles(self.placed, world, self.caller)
        self.generator = self._replay(files) if replay is not None else self._engine()
        self.run = Run(
            config,
            self.roles,
            self.generator,
            self.inputs.train,
            platform=self.platform,
            exchange=self.exchange,
            watch=watch,
            trains=not rollout_only,
        )

    def _engine(self) -> Generator:
        with training_memory_offloaded(self.roles, self.platform):
            return Generator(
                self.placed,
                self.roles.actor,
                eos_token_ids=self.inputs.eos_token_ids,
                platform=self.platform,
                exchange=self.exchange,
            )

    def _replay(self, files: dict[int, Path]) -> Replay:
        vocab_size = self.placed.actor.spec.vocab_size
        return Replay(files, vocab_size=vocab_size, max_length=self.config.max_sequence_length)

    @classmethod
    def from_yaml(cls, path: str, overrides: list[str] | tuple[str, ...] = ()) -> Self:
        """The trainer of a config file; a user's functions may lie beside it."""
        search_beside(path)
        return cls(ExperimentConfig.from_yaml(path, overrides))

    def fit(self, num_iterations: int | None = None) -> RunSummary:
        """Train for `num_iterations` (default: the config's) and write the run directory; ends with runs/NAME/hf,
        unless it is a replay or rolls out alone."""
        num_iterations = self.config.num_iterations if num_iterations is None else num_iterations
        if num_iterations < 1:
            raise ConfigError(f"num_iterations = {num_iterations}: a run has at least one iteration")
        with record_run(self.config, num_iterations, rank=self.platform.rank, decode=self.inputs.decode) as recorder:
            for line in self.inputs.notes() + self._notes():
                recorder.message(line)
            if self.config.metrics.eval_interval:
                recorder.phase("evaluating before training")
                recorder.before_training(self.evaluate())
            for iteration in self._iterations(num_iterations):
                done = self.iterate(iteration, num_iterations, recorder)
                if done is None:
                    continue
                if self._evaluates(iteration, num_iterations):
                    recorder.phase(f"iteration {iteration}: evaluating")
                    recorder.evaluated(done, self.evaluate())
                recorder.iteration(done)
            if self.writes_model:
                recorder.phase("writing the trained actor")
                export_huggingface(self.roles.actor, self.config.run_dir / "hf", report=recorder.message)
        return recorder.summary()

    def iterate(self, iteration: int, num_iterations: int, recorder: Recorder) -> Iteration | None:
        """One iteration of the flow; None where it lost a step to a number that is not finite, and may."""
        if isinstance(self.generator, Replay):
            self.run.skip_to(iteration)
        self.run.begin(iteration, num_iterations, recorder.phase)
        try:
            done = self.run.finished(self.flow(self.run))
        except NonFinite as found:
            self._lost(iteration, found, recorder)
            return None
        if isinstance(self.generator, Replay):
            recorder.message(self.generator.compared(done))
        self.run.state = replace(self.run.state, nonfinite_in_a_row=0)
        return done

    def _iterations(self, num_iterations: int) -> Sequence[int]:
        """Those to run, which ascend."""
        if isinstance(self.generator, Replay):
            return self.generator.iterations(num_iterations, after=self.run.state.iteration)
        return range(1, num_iterations + 1)

    def _lost(self, iteration: int, found: NonFinite, recorder: Recorder) -> None:
        """Keep what was computed; raise unless the config lets the run go on. Every rank has found the same."""
        config, in_a_row = self.config.nonfinite, self.run.state.nonfinite_in_a_row + 1
        self.run.state = replace(self.run.state, nonfinite_in_a_row=in_a_row)
        recorder.lost(iteration, str(found), found.tensors)
        dist.barrier(group=dist.group.WORLD)  # the first rank to leave ends the others
        if config.action == "stop" or in_a_row > config.max_in_a_row:
            rule = "nonfinite.action = stop"
            if config.action == "skip":
                rule = f"{in_a_row} iterations in a row, nonfinite.max_in_a_row = {config.max_in_a_row}"
            raise NonFiniteError(f"iteration {iteration}: {found} ({rule})") from found

    def evaluate(self) -> dict[str, float]:
        """Greedy responses to the held-out prompts: how many are right, and their mean score."""
        heldout, right, name = self.inputs.heldout, self.inputs.right, self.config.metrics.eval_reward
        assert heldout is not None and right is not None and name is not None, "the config names no held-out data"
        prompts = heldout.batch(list(range(len(heldout))))
        responses = self.run.greedy_responses(prompts)
        return evaluate(
            responses, prompts, right, name, caller=self.caller, scorer=self.roles.scorer, exchange=self.exchange
        )

    def _evaluates(self, iteration: int, num_iterations: int) -> bool:
        interval = self.config.metrics.eval_interval
        return interval > 0 and (iteration % interval == 0 or iteration == num_iterations)

    def _notes(self) -> list[str]:
        """What the user should know of the choices that were made."""
        notes = []
        if isinstance(self.generator, Replay):
            notes.append(
                f"a replay of the dumped batches of {len(self.generator.files)} iterations: nothing is generated, "
                f"held-out prompts are not evaluated, and no model is written"
            )
        elif not self.writes_model:
            notes.append("rollout only: nothing is trained, and no model is written")
        if self.platform.has_cuda and not self.config.rollout.enforce_eager and not self.generator.weights_stay:
            notes.append("rollout: the engine gathers its weights for each iteration, so it runs without CUDA graphs")
        changed = self.config.sampling.changed_distribution()
        if changed:
            notes.append(
                f"{', '.join(changed)}: the engine's log-probs are of the distribution it samples from, the "
                f"trainer's of the whole softmax; rollout/log_prob_diff_* and gen_kl measure that difference too"
            )
        return notes
