"""TRL's GRPOTrainer on configs/smollm2_sums.yaml's rows and model: accuracy by iteration, seconds by phase.

    torchrun --nproc-per-node N -m tests.bench.peer_programs.trl_sums SETTING.json generate|vllm

SETTING.json is of tests.bench.sums. SETTING.result.json gets {"accuracy": {iteration: share}, "seconds": [...]}.
"""

import functools
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from tests.bench.peer_programs.leaving import leave
from tests.bench.peer_programs.trl_grpo import Marks
from tests.bench.peer_programs.vllm_patches import keep_plain_weights, let_trl_import
from tests.bench.peer_programs.workload import slowest

let_trl_import()
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.generation import vllm_generation  # noqa: E402

EVALUATED = 50  # rows of a batch


class Evaluations(TrainerCallback):
    """Greedy accuracy on the held-out rows before the first step, every so many and after the last.

    No phase has the seconds of an evaluation.
    """

    def __init__(self, rows: list[dict[str, Any]], tokenizer: Any, *, every: int, last: int, tokens: int) -> None:
        self.rows, self.tokenizer, self.every, self.last, self.tokens = rows, tokenizer, every, last, tokens
        self.steps, self.found = 0, dict[int, float]()

    def on_train_begin(self, *args: Any, model: Any, **kwargs: Any) -> None:
        self._evaluate(model)

    def on_step_end(self, *args: Any, model: Any, **kwargs: Any) -> None:
        self.steps += 1
        if self.steps % self.every == 0 or self.steps == self.last:
            self._evaluate(model)

    @torch.no_grad()
    def _evaluate(self, model: Any) -> None:
        if dist.get_rank() == 0:
            was, right = model.training, 0
            model.eval()
            for first in range(0, len(self.rows), EVALUATED):
                right += self._right(model, self.rows[first : first + EVALUATED])
            model.train(was)
            self.found[self.steps] = right / len(self.rows)
            print(f"step {self.steps}: accuracy {self.found[self.steps]:.3f}", flush=True)
        dist.barrier()

    def _right(self, model: Any, rows: list[dict[str, Any]]) -> int:
        texts = [
            self.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
            for row in rows
        ]
        given = self.tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
        made = model.generate(**given, max_new_tokens=self.tokens, do_sample=False)
        answers = self.tokenizer.batch_decode(made[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
        return sum(score(text, row["answer"]) for text, row in zip(answers, rows, strict=True) if text)


def score(response: str, answer: str) -> float:
    """As hybridflow.rewards:numeric_match where answers are whole numbers: 1 where the last number is the answer."""
    numbers = re.findall(r"-?\d+", response)
    return float(bool(numbers) and numbers[-1] == answer)


def rewards(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    return [score(messages[-1]["content"], right) for messages, right in zip(completions, answer, strict=True)]


def main() -> None:
    path, how = Path(sys.argv[1]), sys.argv[2]
    setting = json.loads(path.read_text())
    dist.init_process_group("gloo")
    torch.set_num_threads(2 // dist.get_world_size())
    if how == "vllm":
        keep_plain_weights()
        vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype="bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(setting["model"])
    train, heldout = (read(Path(setting[key])) for key in ("train", "heldout"))
    steps = setting["rows"] // setting["mini_batch"]
    marks = Marks(steps)
    every, last = steps * setting["eval_interval"], steps * setting["iterations"]
    evaluations = Evaluations(heldout, tokenizer, every=every, last=last, tokens=setting["tokens"])
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(setting["model"], dtype=torch.float32),
        reward_funcs=rewards,
        args=config(setting, steps, vllm=how == "vllm"),
        train_dataset=Dataset.from_list(train),
        processing_class=tokenizer,
        callbacks=[marks, evaluations],
    )
    trainer._generate = marks.generation(trainer._generate)
    trainer._generate_and_score_completions = marks.scoring(trainer._generate_and_score_completions)
    began = time.perf_counter()
    trainer.train()
    whole = time.perf_counter() - began
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, marks.rows, group=dist.group.WORLD)
    if dist.get_rank() == 0:
        accuracy = {step // steps: share for step, share in evaluations.found.items()}
        result = {"accuracy": accuracy, "seconds": slowest(ranks), "with_evaluations": whole}
        path.with_suffix(".result.json").write_text(json.dumps(result))


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def config(setting: dict[str, Any], steps: int, *, vllm: bool) -> GRPOConfig:
    engine = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.1,
        "vllm_max_model_length": setting["longest"],
    }
    return GRPOConfig(
        output_dir=setting["scratch"],
        seed=setting["seed"],
        data_seed=setting["seed"],
        per_device_train_batch_size=setting["mini_batch"] // dist.get_world_size(),
        gradient_accumulation_steps=1,
        steps_per_generation=steps,
        num_iterations=1,
        num_generations=setting["samples"],
        max_completion_length=setting["tokens"],
        beta=0.0,
        temperature=1.0,
        loss_type="grpo",
        scale_rewards="group",
        learning_rate=setting["lr"],
        lr_scheduler_type=setting["schedule"],
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=steps * setting["iterations"],
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        bf16=True,
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
