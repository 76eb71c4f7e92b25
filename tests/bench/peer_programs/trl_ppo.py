"""TRL's PPOTrainer.

    torchrun --nproc-per-node 2 -m tests.bench.peer_programs.trl_ppo JOB

It tells no seconds of its phases: the rollout is its function `batch_generation`, the update begins with the first
permutation of the rows that it draws.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import trl.experimental.ppo.ppo_trainer as ppo_trainer
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer

from tests.bench.peer_programs.leaving import leave
from tests.bench.peer_programs.workload import (
    END,
    KL_COEF,
    LEARNING_RATE,
    PAD,
    Job,
    Measured,
    Seconds,
    phases,
    prompt_ids,
    slowest,
)


class Marks(TrainerCallback):
    """When the phases of each iteration began and ended, and how long the responses were."""

    def __init__(self) -> None:
        self.began = self.generated = self.scored = 0.0
        self.rows: list[Seconds] = []
        self.response_tokens: list[int] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        ended = time.perf_counter()
        self.rows.append(phases(self.generated - self.began, self.scored - self.generated, ended - self.scored))

    def generation(self, generate: Callable) -> Callable:
        def marked(model: PreTrainedModel, queries: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
            self.began = time.perf_counter()
            ids, logits = generate(model, queries, *rest)
            self.generated = time.perf_counter()
            self.response_tokens.append(num_response_tokens(ids[:, queries.shape[1] :]))
            return ids, logits

        return marked

    def numpy(self, original: Any) -> Any:
        """numpy as the trainer sees it."""

        class Random:
            @staticmethod
            def permutation(size: int) -> Any:
                self.scored = time.perf_counter()
                return original.random.permutation(size)

        class Numpy:
            random = Random

            def __getattr__(self, name: str) -> Any:
                return getattr(original, name)

        return Numpy()


def main() -> None:
    path = Path(sys.argv[1])
    job, marks = Job.read(path), Marks()
    torch.set_num_threads(1)
    ppo_trainer.batch_generation = marks.generation(ppo_trainer.batch_generation)
    ppo_trainer.np = marks.numpy(ppo_trainer.np)
    trainer(job, marks).train()
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (marks.rows, marks.response_tokens), group=dist.group.WORLD)
    if dist.get_rank() == 0:
        tokens = [sum(each) for each in zip(*(tokens for _, tokens in ranks), strict=True)]
        Measured(slowest([rows for rows, _ in ranks]), tokens).write(path)


def trainer(job: Job, marks: Marks) -> PPOTrainer:
    data = Dataset.from_dict({"input_ids": prompt_ids(job.prompts)})
    return PPOTrainer(
        args=config(job),
        processing_class=AutoTokenizer.from_pretrained(job.model("actor")),
        model=loaded(LlamaForCausalLM, job.model("actor")),
        ref_model=loaded(LlamaForCausalLM, job.model("actor")),
        reward_model=loaded(LlamaForSequenceClassification, job.model("reward")),
        value_model=loaded(LlamaForSequenceClassification, job.model("critic")),
        train_dataset=data,
        eval_dataset=data,
        callbacks=[marks],
    )


def loaded(model_class: type[PreTrainedModel], directory: str) -> PreTrainedModel:
    return model_class.from_pretrained(directory, dtype=torch.float32)


def config(job: Job) -> PPOConfig:
    work = job.workload
    own = work.sequences // num_processes()
    return PPOConfig(
        output_dir=job.scratch,
        per_device_train_batch_size=own,
        gradient_accumulation_steps=1,
        num_mini_batches=work.mini_batches,
        num_ppo_epochs=1,
        local_rollout_forward_batch_size=own,
        response_length=work.max_response,
        total_episodes=work.sequences * (job.iterations + 1),
        stop_token="eos" if work.ends else None,
        missing_eos_penalty=None,
        temperature=1.0,
        kl_coef=KL_COEF,
        learning_rate=LEARNING_RATE,
        num_sample_generations=0,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        gradient_checkpointing=False,
    )


def num_processes() -> int:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_world_size()


def num_response_tokens(responses: torch.Tensor) -> int:
    """Those of a row but for the padding at its end, which begins after an end token."""
    padding = (responses == PAD).flip(1).cumprod(dim=1).sum(dim=1)  # (rows,); a last token may be PAD by chance
    last = responses.gather(1, (responses.shape[1] - 1 - padding).clamp(min=0)[:, None])[:, 0]
    return responses.numel() - int(padding[last == END].sum())


if __name__ == "__main__":
    main()
    leave()
