"""TRL's GRPOTrainer, with `generate` of transformers or with vLLM in its own process.

    torchrun --nproc-per-node N -m tests.bench.peer_programs.trl_grpo JOB generate|vllm

It tells no seconds of its phases: the rollout is its method `_generate`, scoring what `_generate_and_score_completions`
takes beside it, the update the rest of the optimizer steps that one generation is for.
"""

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoTokenizer, LlamaForCausalLM, TrainerCallback

from tests.bench.peer_programs.leaving import leave
from tests.bench.peer_programs.scores import score
from tests.bench.peer_programs.vllm_patches import keep_plain_weights, let_trl_import
from tests.bench.peer_programs.workload import (
    KL_COEF,
    LEARNING_RATE,
    Job,
    Measured,
    Seconds,
    phases,
    prompt_texts,
    slowest,
)

let_trl_import()
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.generation import vllm_generation  # noqa: E402


class Marks(TrainerCallback):
    """Seconds of the phases of each iteration, which has so many optimizer steps."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0
        self.began = self.rollout = self.both = 0.0
        self.rows: list[Seconds] = []
        self.response_tokens: list[int] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if self.done % self.steps == 0:
            self.began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.done += 1
        if self.done % self.steps == 0:
            update = time.perf_counter() - self.began - self.both
            self.rows.append(phases(self.rollout, self.both - self.rollout, update))

    def generation(self, generate: Callable) -> Callable:
        def marked(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = generate(*args, **kwargs)
            self.rollout = time.perf_counter() - started
            return result

        return marked

    def scoring(self, score_completions: Callable) -> Callable:
        def marked(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = score_completions(*args, **kwargs)
            self.both = time.perf_counter() - started
            self.response_tokens.append(result["completion_ids"].numel())
            return result

        return marked


def main() -> None:
    path, how = Path(sys.argv[1]), sys.argv[2]
    job = Job.read(path)
    dist.init_process_group("gloo")
    num_processes = dist.get_world_size()
    torch.set_num_threads(2 // num_processes)
    if how == "vllm":
        keep_plain_weights()
        # TRL leaves the dtype to vLLM, which makes float32 models half precision
        vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype=job.dtype)
    marks = Marks(job.workload.mini_batches)
    trainer = GRPOTrainer(
        model=LlamaForCausalLM.from_pretrained(job.model("actor"), dtype=torch.float32),
        reward_funcs=rewards,
        args=config(job, num_processes, vllm=how == "vllm"),
        train_dataset=Dataset.from_dict({"prompt": prompt_texts(job.prompts)}),
        processing_class=AutoTokenizer.from_pretrained(job.model("actor")),
        callbacks=[marks],
    )
    trainer._generate = marks.generation(trainer._generate)
    trainer._generate_and_score_completions = marks.scoring(trainer._generate_and_score_completions)
    trainer.train()
    ranks: list[Any] = [None] * num_processes
    dist.all_gather_object(ranks, (marks.rows, marks.response_tokens), group=dist.group.WORLD)
    if dist.get_rank() == 0:
        tokens = [sum(each) for each in zip(*(tokens for _, tokens in ranks), strict=True)]
        Measured(slowest([rows for rows, _ in ranks]), tokens).write(path)


def rewards(completions: list[str], **columns: Any) -> list[float]:
    return [score(completion) for completion in completions]


def config(job: Job, num_processes: int, *, vllm: bool) -> GRPOConfig:
    work = job.workload
    engine = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.1,
        "vllm_max_model_length": work.max_prompt + work.max_response,
    }
    full_length = {"ignore_eos": True, "min_tokens": work.max_response}
    return GRPOConfig(
        output_dir=job.scratch,
        per_device_train_batch_size=work.mini_batch // num_processes,
        gradient_accumulation_steps=1,
        steps_per_generation=work.mini_batches,
        num_iterations=1,
        num_generations=work.samples,
        max_completion_length=work.max_response,
        generation_kwargs=full_length if vllm else {"min_new_tokens": work.max_response},
        beta=KL_COEF,
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        max_steps=work.mini_batches * (job.iterations + 1),
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        bf16=job.dtype == "bfloat16",
        use_cpu=True,
        disable_tqdm=True,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        ddp_find_unused_parameters=False,
        **(engine if vllm else {}),
    )


if __name__ == "__main__":
    main()
    leave()
