"""The programs that are compared: how each is started, and what it does differently from the others."""

import csv
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.bench.peer_programs.workload import KL_COEF, LEARNING_RATE, Job, Measured, Workload, phases, result_of

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = "tests.bench.peer_programs"
LONGEST = 3600.0  # seconds that a program may take
THREADS = 2  # of all processes together
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "PYTHONWARNINGS": "ignore",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in the program's own process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
Command = list[str]


@dataclass(frozen=True)
class Program:
    """command: of the Python of its environment and a job. processes: each has its share of the two threads."""

    name: str
    command: Callable[[str, Path], Command]
    processes: int
    differs: str
    is_ours: bool = False


def torchrun(python: str, processes: int, *module: str) -> Command:
    """--standalone takes a free port."""
    launcher = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*launcher, "-m", *module]


def hand_loop(python: str, job: Path) -> Command:
    return [python, "-m", f"{PROGRAMS}.hand_loop", str(job)]


def trl_ppo(python: str, job: Path) -> Command:
    return torchrun(python, 2, f"{PROGRAMS}.trl_ppo", str(job))


def trl_grpo(how: str, processes: int) -> Callable[[str, Path], Command]:
    return lambda python, job: torchrun(python, processes, f"{PROGRAMS}.trl_grpo", str(job), how)


def ours(python: str, job: Path) -> Command:
    return torchrun(python, 2, "hybridflow.train", str(job.with_suffix(".yaml")))


OURS = Program(
    "hybridflow",
    ours,
    2,
    "sequences packed without padding, the prompt of a group once; mini-batches of whole groups; the engine has the "
    "actor's own weights, and a prefix cache; old log-probs take a forward pass, those of GRPO's first mini-batch come "
    "with its update; what replicas that are done score while others generate counts as rollout; "
    "bf16: weights and activations are bf16, the optimizer's weights float32",
    is_ours=True,
)
HAND_LOOP = Program(
    "hand-written loop, vLLM",
    hand_loop,
    1,
    "micro-batches of 16 in order of length, padded to their longest; a second copy of the weights, loaded each "
    "iteration; one loss for actor and critic; bf16: float32 weights under autocast, vLLM in bf16",
)
TRL_PPO = Program(
    "TRL PPOTrainer",
    trl_ppo,
    2,
    "transformers' generate; prompts and responses padded to the longest of 32, and computed to the end of the "
    "padding; old log-probs come from generation's own logits, without a forward pass",
)
TRL_GRPO = Program(
    "TRL GRPOTrainer, generate",
    trl_grpo("generate", 2),
    2,
    "transformers' generate; padded; bf16: float32 weights under autocast",
)
TRL_GRPO_VLLM = Program(
    "TRL GRPOTrainer, vLLM",
    trl_grpo("vllm", 1),
    1,
    "vLLM in the process with a copy of the weights; engine log-probs weigh tokens; "
    "bf16: float32 weights under autocast",
)


def programs(workload: Workload, dtype: str) -> list[Program]:
    """Ours first. TRL's PPO is compared in float32 alone."""
    if workload.algorithm == "grpo":
        return [OURS, TRL_GRPO, TRL_GRPO_VLLM]
    return [OURS, HAND_LOOP] + ([TRL_PPO] if dtype == "float32" else [])


def run_program(program: Program, job: Job, path: Path, peer_python: Path) -> Measured:
    """What it measured, the warm-up left out. Errors: SystemExit with the end of its output where it fails."""
    result_of(path).unlink(missing_ok=True)
    job.write(path)
    if program.is_ours:
        path.with_suffix(".yaml").write_text(yaml.safe_dump(our_config(job)))
    python = sys.executable if program.is_ours else str(peer_python)
    run(program.command(python, path), path.with_suffix(".log"), threads=THREADS // program.processes)
    measured = our_measured(job) if program.is_ours else Measured.read(path)
    assert len(measured.seconds) == len(measured.response_tokens) == job.iterations + 1, f"{measured}, {job.iterations}"
    return Measured(measured.seconds[1:], measured.response_tokens[1:])


def run(command: Command, log: Path, *, threads: int) -> None:
    """To its end, with all that it started."""
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(LONGEST)
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks, which are in sessions of their own
            process.wait(60)
            raise
    if status:
        lines = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise SystemExit(f"{' '.join(command)}\nended with status {status}; the end of {log}:\n{lines}")


# ------------------------------------------------------------------------------------------------ ours


def our_config(job: Job) -> dict[str, object]:
    work, ppo = job.workload, job.workload.algorithm == "ppo"
    optimizer = {"optimizer": {"lr": LEARNING_RATE}}
    functions = {"functions": [{"function": f"{PROGRAMS}.scores:by_length"}]}
    return {
        "name": "ours",
        "output_dir": job.scratch,
        "num_iterations": job.iterations + 1,
        "data": {
            "train": job.prompts,
            "prompts_per_iteration": work.prompts,
            "max_prompt_length": work.max_prompt,
            "shuffle": False,
        },
        "sampling": {
            "samples_per_prompt": work.samples,
            "max_response_length": work.max_response,
            "ignore_eos": not work.ends,
        },
        "actor": role(job, "actor") | optimizer,
        "reference": role(job, "actor"),
        **({"critic": role(job, "critic") | optimizer} if ppo else {}),
        "reward": {"models": [role(job, "reward")]} if ppo else functions,
        "rollout": {"kv_cache_gib": 0.5},
        "algorithm": {
            "name": work.algorithm,
            "kl": {"coef": KL_COEF},
            "update": {"mini_batch_size": work.mini_batch, "whole_prompts": not ppo},
        },
        "checkpoint": {"load": "none"},
        "metrics": {"tensorboard": False, "num_samples": 0},
    }


def role(job: Job, kind: str) -> dict[str, object]:
    return {"model": job.model(kind), "dtype": job.dtype}


def our_measured(job: Job) -> Measured:
    """Seconds are the largest of any rank."""
    with (Path(job.scratch) / "ours" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    stages = ("rollout", "estimate", "update")
    seconds = [phases(*(float(row[f"time/{stage}_seconds"]) for stage in stages)) for row in rows]
    tokens = [round(float(row["rollout/response_length_mean"]) * job.workload.sequences) for row in rows]
    return Measured(seconds, tokens)
