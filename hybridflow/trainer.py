"""The iteration and the loop.

Every rank runs this same program over the same global batch; the roles shard the work. Start it under torchrun:

    trainer = RLTrainer.from_yaml("configs/quickstart.yaml", ["seed=3"])
    trainer.fit()
"""

import contextlib
from collections.abc import Iterator
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.algorithms.advantages import gae, whiten
from hybridflow.algorithms.kl import KL_ESTIMATORS, AdaptiveKL, FixedKL
from hybridflow.algorithms.rewards import token_rewards
from hybridflow.batch import PromptBatch, RolloutBatch, TrainBatch
from hybridflow.checkpoint.export import export_huggingface
from hybridflow.config import ExperimentConfig
from hybridflow.data.inputs import Inputs, load_inputs
from hybridflow.data.prompts import PromptOrder
from hybridflow.errors import ConfigError
from hybridflow.flows.evaluate import evaluate
from hybridflow.generator import Generator
from hybridflow.models.optimizer import NO_BYTES, learning_rate
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.parallel.seeds import request_seed
from hybridflow.planning.placed import place
from hybridflow.recording.iteration import Iteration, cost_metrics, rollout_metrics
from hybridflow.recording.measure import Stopwatch
from hybridflow.recording.recorder import Recorder, RunSummary, record_run
from hybridflow.rewards.scorer import Scorer
from hybridflow.roles.base import World
from hybridflow.roles.objectives import PolicyObjective, value_objective
from hybridflow.roles.policy import Actor, Reference
from hybridflow.roles.values import Critic, RewardModel
from hybridflow.rollout.patches import prepare_vllm

Metrics = dict[str, float | Tensor]


class RLTrainer:
    """PPO on one config. Building it is collective over the world and checks everything a user gave."""

    def __init__(self, config: ExperimentConfig) -> None:
        _, world_size = platforms.torchrun_rank()
        self.config, self.placed = config, place(config, world_size)
        self.platform = platforms.start(config.seed)
        self.inputs: Inputs = load_inputs(config)
        prepare_vllm()  # a missing vLLM is told before the models load
        self.exchange = Exchange(dist.group.WORLD, self.platform.device)
        self.watch = Stopwatch(self.platform.synchronize)
        self._build_roles()
        with self._training_memory_offloaded():
            self.generator = Generator(
                self.placed,
                self.actor,
                eos_token_ids=self.inputs.eos_token_ids,
                platform=self.platform,
                exchange=self.exchange,
            )
        self.order = PromptOrder(len(self.inputs.train), config.seed, config.data.shuffle)
        self.kl_control = _kl_controller(config)

    @classmethod
    def from_yaml(cls, path: str, overrides: list[str] | tuple[str, ...] = ()) -> Self:
        return cls(ExperimentConfig.from_yaml(path, overrides))

    def _build_roles(self) -> None:
        config = self.config
        temperature = config.sampling.temperature
        bucket_bytes = config.rollout.bucket_bytes(cuda=self.platform.has_cuda)
        world = World(self.platform, ProcessGroups(), self.exchange, bucket_bytes)
        placed = self.placed.models
        self.actor = Actor(placed["actor"], temperature=temperature, world=world)
        self.critic = Critic(placed["critic"], world=world)
        self.reference = Reference(placed["reference"], temperature=temperature, world=world)
        models = [RewardModel(model, world=world) for model in self.placed.reward_models]
        self.scorer = Scorer(
            config.reward,
            models,
            decode=self.inputs.decode,
            rank=self.platform.rank,
            world_size=self.platform.world_size,
        )
        self.policy_objective = PolicyObjective.of(config.algorithm)
        self.value_objective = value_objective(config.algorithm)

    # ---- the loop

    def fit(self, num_iterations: int | None = None) -> RunSummary:
        """Train for `num_iterations` (default: the config's) and write the run directory; ends with runs/NAME/hf."""
        num_iterations = self.config.num_iterations if num_iterations is None else num_iterations
        if num_iterations < 1:
            raise ConfigError(f"num_iterations = {num_iterations}: a run has at least one iteration")
        with record_run(self.config, num_iterations, rank=self.platform.rank, decode=self.inputs.decode) as recorder:
            for line in self.inputs.left_out() + self._notes():
                recorder.message(line)
            if self.config.metrics.eval_interval:
                recorder.phase("evaluating before training")
                recorder.before_training(self.evaluate())
            for iteration in range(1, num_iterations + 1):
                done = self.iterate(iteration, num_iterations, recorder)
                if self._evaluates(iteration, num_iterations):
                    recorder.phase(f"iteration {iteration}: evaluating")
                    recorder.evaluated(done, self.evaluate())
                recorder.iteration(done)
            recorder.phase("writing the trained actor")
            export_huggingface(self.actor, self.config.run_dir / "hf", report=recorder.message)
        return recorder.summary()

    def _notes(self) -> list[str]:
        """What the user should know of the choices that were made."""
        graphs = self.platform.has_cuda and not self.config.rollout.enforce_eager
        if graphs and not self.generator.weights_stay:
            return ["rollout: the engine gathers its weights for each iteration, so it runs without CUDA graphs"]
        return []

    def _evaluates(self, iteration: int, num_iterations: int) -> bool:
        interval = self.config.metrics.eval_interval
        return interval > 0 and (iteration % interval == 0 or iteration == num_iterations)

    def iterate(self, iteration: int, num_iterations: int, recorder: Recorder) -> Iteration:
        """One PPO iteration: generate, score, estimate advantages, update."""
        self._reset_costs()
        prompts, first_prompt = self._next_prompts()
        recorder.phase(f"iteration {iteration}: generating")
        with self.watch.phase("rollout"):
            rollout = self.generate(prompts, iteration, first_prompt)
        recorder.phase(f"iteration {iteration}: scoring")
        with self.watch.phase("estimate"):
            batch, raw_scores = self.estimate(rollout, prompts)
        recorder.batch(iteration, batch)
        recorder.phase(f"iteration {iteration}: updating")
        with self.watch.phase("update"):
            updates = self.update(batch, iteration, num_iterations)
        metrics = rollout_metrics(batch, raw_scores) | {"kl/coef": self.kl_control.coef} | updates
        self.kl_control = self.kl_control.updated(float(metrics["kl/sequence_mean"]), len(batch))
        metrics |= cost_metrics(
            batch,
            watch=self.watch,
            reshards=self.generator.costs,
            exchange=self.exchange,
            actor_bytes=self.actor.trained.memory_bytes() if self.actor.trained else NO_BYTES,
            engine_bytes=self.generator.own_bytes,
            num_steps=self.config.algorithm.ppo_epochs * len(batch) // self.config.algorithm.mini_batch_size,
        )
        return Iteration(iteration, prompts, batch, raw_scores, metrics)

    def _next_prompts(self) -> tuple[PromptBatch, int]:
        """The next prompts, and the number of the first of them in the run."""
        first_prompt = self.order.position
        return self.inputs.train.batch(self.order.next(self.config.data.prompts_per_iteration)), first_prompt

    def _reset_costs(self) -> None:
        self.watch.reset()
        self.exchange.seconds = 0.0
        self.generator.costs.clear()

    def generate(self, prompts: PromptBatch, iteration: int, first_prompt: int) -> RolloutBatch:
        with self.engine_awake(), self.watch.phase("generate"):
            return self.generator.generate(
                prompts,
                samples_per_prompt=self.config.sampling.samples_per_prompt,
                iteration=iteration,
                first_prompt=first_prompt,
            )

    def estimate(self, rollout: RolloutBatch, prompts: PromptBatch) -> tuple[TrainBatch, Tensor]:
        """Scores, log-probs, values, token rewards, advantages and returns: all that the update needs; the raw scores.

        Every rank computes what the roles on it can; the results are exchanged when all are done.
        """
        algorithm, mask = self.config.algorithm, rollout.response_mask
        with self.watch.phase("reward"):
            parts = self.scorer.parts(rollout, prompts)
        with self.watch.phase("log_probs"):
            parts.append(self.actor.log_probs(rollout))
        with self.watch.phase("reference"):
            parts.append(self.reference.log_probs(rollout))
        with self.watch.phase("values"):
            parts.append(self.critic.values(rollout))
        *scores, log_probs, ref_log_probs, values = self.exchange.wholes(parts)
        raw_scores = self.scorer.total(scores)
        scores = self.scorer.shaped(raw_scores, rollout)
        rewards = token_rewards(
            scores,
            KL_ESTIMATORS[algorithm.kl.estimator](log_probs, ref_log_probs) * mask,
            mask,
            lengths=rollout.lengths,
            kl_coef=self.kl_control.coef if algorithm.kl.use == "reward" else 0.0,
        )
        advantages, returns = gae(
            rewards, values, mask, lengths=rollout.lengths, gamma=algorithm.gamma, gae_lambda=algorithm.gae_lambda
        )
        if algorithm.whiten_advantages:
            advantages = whiten(advantages, mask)
        batch = TrainBatch(
            **vars(rollout),
            log_probs=log_probs,
            ref_log_probs=ref_log_probs,
            values=values,
            scores=scores,
            rewards=rewards,
            advantages=advantages,
            returns=returns,
        )
        return batch, raw_scores

    def update(self, batch: TrainBatch, iteration: int, num_iterations: int) -> Metrics:
        """ppo_epochs passes over the batch in mini-batches; the means of what the steps report.

        No step waits for what another role does: roles on different ranks update at the same time.
        """
        algorithm = self.config.algorithm
        actor_lr = learning_rate(self.config.actor.optimizer, iteration, num_iterations)
        critic_lr = learning_rate(self.config.critic.optimizer, iteration, num_iterations)
        actor_steps, critic_steps = [], []
        for epoch in range(algorithm.ppo_epochs):
            generator = torch.Generator().manual_seed(request_seed(self.config.seed, iteration, epoch))
            for mini_batch in batch.mini_batches(algorithm.mini_batch_size, generator):
                with self.watch.phase("critic_update"):
                    critic_steps.append(self.critic.update(mini_batch, self.value_objective, lr=critic_lr))
                if iteration <= algorithm.critic_warmup_iterations:
                    continue
                with self.watch.phase("actor_update"):
                    kl_coef = self.kl_control.coef
                    step = self.actor.update(mini_batch, self.policy_objective, kl_coef=kl_coef, lr=actor_lr)
                    actor_steps.append(step)
        metrics = self._means("critic", self.critic.report, critic_steps)
        if actor_steps:
            metrics |= self._means("actor", self.actor.report, actor_steps)
        return metrics | {"actor/lr": actor_lr, "critic/lr": critic_lr}

    def _means(self, role: str, names: tuple[str, ...], steps: list[Tensor]) -> Metrics:
        """The mean over the steps of what all ranks together report."""
        means = self.exchange.summed(torch.stack(steps)).mean(0).tolist()
        return {f"{role}/{name}": mean for name, mean in zip(names, means, strict=True)}

    def evaluate(self) -> dict[str, float]:
        """Greedy responses to the held-out prompts: how many are right, and their mean score."""
        heldout, right, name = self.inputs.heldout, self.inputs.right, self.config.metrics.eval_reward
        assert heldout is not None and right is not None and name is not None, "the config names no held-out data"
        prompts = heldout.batch(list(range(len(heldout))))
        responses = self.greedy_responses(prompts)
        return evaluate(responses, prompts, self.scorer, right, name, exchange=self.exchange)

    def greedy_responses(self, prompts: PromptBatch) -> RolloutBatch:
        with self.engine_awake():
            return self.generator.generate(prompts, greedy=True, samples_per_prompt=1, iteration=0, first_prompt=0)

    @contextlib.contextmanager
    def engine_awake(self) -> Iterator[None]:
        """The actor's weights are the engine's within the block, in the engine's layout; bitwise restored after it.

        In strict order: what training alone needs leaves, weights are put in place, caches are emptied, and only when
        that is so on every rank the KV cache takes its memory.
        """
        with self._training_memory_offloaded(), self.generator.resharded():
            self.platform.empty_caches()
            dist.barrier(group=dist.group.WORLD)
            with self.generator.awake():
                yield

    @contextlib.contextmanager
    def _training_memory_offloaded(self) -> Iterator[None]:
        """Within the block gradients and optimizer state are where the config wants them while the engine works."""
        with self.actor.offloaded(), self.critic.offloaded():
            self.platform.empty_caches()
            yield


def _kl_controller(config: ExperimentConfig) -> FixedKL | AdaptiveKL:
    kl = config.algorithm.kl
    return FixedKL(kl.coef) if kl.controller == "fixed" else AdaptiveKL(kl.coef, kl.target, kl.horizon)
