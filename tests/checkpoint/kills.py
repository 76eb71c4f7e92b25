"""What is under way when a run ends early: the table of tests/checkpoint/test_kills.py, and what its runs are.

Where a rank dies and what is trained do not depend on each other: each place is in a row, and the product is weekly.
"""

import csv
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hybridflow.checkpoint.store import read_manifest, step_name
from tests.agents import runs_worker as agents
from tests.environments.rollouts_worker import named
from tests.environments.tiny_chat import STOPS, make_chat_inputs
from tests.flows.flows_worker import CRITIC_FREE, DISTILL, critic_free
from tests.tiny_models import make_checkpoints

COSTS = (
    "time/",
    "kv_cache_use",
    "speed/",
    "memory/",
    "reshard/seconds",
    "_per_sec",
    "_ms",
)  # what no two runs have alike

# ------------------------------------------------------------------------------------------------ runs

COMMON = [
    *("checkpoint.save_interval=1", "metrics.dump_batches=true"),
    *("actor.optimizer.schedule=linear", "actor.optimizer.min_lr=1e-4"),  # another rate in each iteration
]
TP1 = "actor.tensor_parallel_size=1"
GROUPS = ["critic=null", "sampling.samples_per_prompt=2"]
NO_KL = ["reference=null", "algorithm.kl.use=none"]


def grpo(**more: Any) -> str:
    return "algorithm=" + json.dumps({"name": "grpo", "update": {"mini_batch_size": 4}, **more})


STALE = {"policy": {"importance": {"kind": "token", "cap": 2.0}}}
PARTIAL = [*GROUPS, grpo(**STALE), *NO_KL, "rollout.tensor_parallel_size=1", "rollout.max_staleness=1"]
PARTIAL += ["rollout.partial={oversample: 1.5}", "sampling.max_response_length=16"]
REWARD = {"models": [{"model": "ROOT/inputs/reward", "dtype": "float32", "ranks": "0"}], "normalization": "running"}
DYNAMIC = {"policy": {"loss_mean": "token_mean", "mask_truncated": True}, "dynamic_sampling": {}}
DIGITS = {"functions": [{"function": "tests.flows.dynamic_rewards:first_is_a_digit"}], "overlong": {"buffer": 2}}
CHAT = ["data.train=ROOT/chat/train.jsonl", "data.chat_template=true", "data.max_prompt_length=32", "reward=null"]
CHAT += ["actor.model=ROOT/chat/policy", "sampling.max_response_length=160", "sampling.samples_per_prompt=4"]
CHAT += ["critic=null", grpo(), *NO_KL, f"sampling.stop_token_ids={STOPS}"]


def agent(**arguments: Any) -> str:
    return agents.named("stops_between", arguments=arguments, max_turn_tokens=16)


RUNS = {
    "ppo": [  # tp 2, the critic dp 2; the reference becomes the actor every second iteration
        *("algorithm.kl.controller=adaptive", "algorithm.update.epochs=2", "reward.normalization=running"),
        *("algorithm.kl.reset_reference_interval=2", "reference.tensor_parallel_size=2"),
    ],
    # two replicas in bfloat16: main weights in float32, all of the optimizer split by ZeRO-1
    "grpo": [*GROUPS, grpo(), TP1, "actor.dtype=bfloat16"],
    "lora": [  # of adapters alone; the reference is the actor with the adapters of some iterations ago
        *("actor.lora={rank: 4}", "critic.lora={rank: 2}", "reference=null"),
        *("algorithm.kl.controller=adaptive", "algorithm.kl.reset_reference_interval=2"),
    ],
    # two ranks share the tokens of rows that are longer than 10
    "context": [*GROUPS, grpo(), TP1, "actor.context_parallel_size=2", "actor.micro_batch_tokens=20"],
    "one step off": [
        *(*GROUPS, grpo(**STALE), *NO_KL, TP1, "actor.ranks=0", "rollout.ranks=1", "rollout.max_staleness=1"),
        "reward=" + json.dumps(REWARD),
    ],
    "partial": [*PARTIAL, f"sampling.stop_token_ids={list(range(10, 25))}"],
    "routes": [
        *("actor.model=ROOT/experts/policy", *PARTIAL, "algorithm.policy.replay_routing=true"),
        *("actor.optimizer.lr=0.01", "sampling.max_response_length=32"),
        f"sampling.stop_token_ids={list(range(10, 35))}",  # so that lengths differ
    ],
    "environment": [*CHAT, TP1, named("Talk", max_turn_tokens=12, num_workers=2)],
    "agent": [*CHAT, agent()],
    "leftover": [*GROUPS, "seed=2", grpo(**DYNAMIC), *NO_KL, "reward=" + json.dumps(DIGITS)],  # this seed has a surplus
}
FLOWS = {  # whose checkpoints hold what those of other runs hold
    "remax": critic_free("remax", *CRITIC_FREE["remax"]),
    "reinforce group": [*critic_free("reinforce"), "algorithm.baseline=group"],
    "distill": DISTILL,
    "vapo": ["algorithm={name: ppo, value_gae_lambda: 1.0, length_adaptive_alpha: 0.2, positive_nll_coef: 0.1}"],
}


def make_more_inputs(root: Path, runs: set[str]) -> None:
    if runs & {"environment", "agent"}:
        make_chat_inputs(root / "chat")
        (root / "words").mkdir()
    if "routes" in runs:
        changes = {"num_experts": 16, "num_experts_per_tok": 2}
        make_checkpoints(root / "experts", family="qwen3_moe", tied=False, head_dim=32, num_layers=4, changes=changes)


# ------------------------------------------------------------------------------------------------ ends


@dataclass(frozen=True)
class End:
    """How a start ends, by tests/checkpoint/killed_worker.py: what befalls `rank` in its `number`-th call of `place`.

    number 0: nothing. what: a kill so many seconds later, or what the worker knows else. said: what is printed.
    disk: before the start, the options of a mount of one that holds the checkpoints alone.
    """

    place: str = ""
    number: int = 0
    rank: str = "0"
    what: str = "0"
    overrides: tuple[str, ...] = ()
    said: str = ""
    disk: str = ""

    def at(self, number: int, **more: Any) -> "End":
        return replace(self, number=number, **more)


GENERATION = End("hybridflow.roles.generator:Generator.generate", 1)
SCORING = End("hybridflow.flows.run:Run.whole", 1)
# with the calls in an iteration, or one of them
PLACES = {
    "loading": End("hybridflow.checkpoint.resume:load", 1, rank="1"),
    "hand-off": End("hybridflow.reshard.execute:WeightReshard.to_engine", 1, rank="1"),
    "generation": GENERATION.at(1, what="0.1"),
    "scoring": SCORING,
    "update": End("hybridflow.models.optimizer:TrainedModel.step", 2, rank="1"),
    "row of metrics": End("hybridflow.recording.writers:MetricsWriter.write", 1),
    "state": End("hybridflow.checkpoint.writer:write_state", 1),
    "tensors": End("hybridflow.checkpoint.writer:write_records", 1, rank="1"),
    "middle of tensors": End("hybridflow.formats.distributed_storage:_save", 10, rank="1"),
    "metadata": End("hybridflow.checkpoint.writer:finish_save", 1),
    "manifest": End("hybridflow.checkpoint.store:_write_manifest", 1),
    "rename": End("hybridflow.checkpoint.store:replace_directory", 1),
    "between rename and pointer": End("hybridflow.checkpoint.store:point_to", 1),
    "removal of old ones": End("hybridflow.checkpoint.writer:remove", 1),
    "middle of a removal": End("hybridflow.checkpoint.store:shutil.rmtree", 1),
    "anywhere": End("hybridflow.trainers.online:OnlineTrainer.iterate", 1, rank="1", what="0.3"),
}
SAVING = list(PLACES)[list(PLACES).index("state") : -1]
IN_BACKGROUND = ("checkpoint.async_save=true",)
STAGED = ("actor.offload_optimizer=always",)  # of some starts: the undisturbed run never has it
TOLD = SCORING.at(1, what="told", said="before its first step")
UNDER_WAY = End("hybridflow.rollout.partial:UnderWay.add", 3, rank="1")


@dataclass(frozen=True)
class Row:
    """A run that ends so often, in each start once, and then at its end.

    left_out: of the metrics. damaged: what was saved last has other weights then, before the last start.
    """

    run: str
    ends: tuple[End, ...]
    num_iterations: int = 5
    left_out: tuple[str, ...] = ()
    damaged: bool = False

    @property
    def undisturbed(self) -> str:
        return f"{self.run}-{self.num_iterations}-undisturbed".replace(" ", "-")

    def overrides(self, root: Path) -> list[str]:
        own = [each.replace("ROOT", str(root)) for each in (RUNS | FLOWS)[self.run]]
        return [f"num_iterations={self.num_iterations}", *COMMON, *own]


# In a start that saves the second checkpoint or a later one there is something to load, and something to remove.
SAVES = tuple(
    PLACES[place].at(
        PLACES[place].number if i else 3 * PLACES[place].number,
        overrides=IN_BACKGROUND * (i % 2) + STAGED * (i // 2 % 2),
    )
    for i, place in enumerate(SAVING)
)
ROOM = "hybridflow.checkpoint.writer:CheckpointWriter._check_room"
FULL = "the checkpoint of iteration 2 cannot be written"
GOES_ON = ("checkpoint.on_error=continue", *IN_BACKGROUND)
# answers come in another order, and a batch of the engine has other rows
ROUNDING = ("rollout/log_prob_diff", "rollout/gen_kl", "rollout/token_mult_prob_error", "environment/cached_prefix")
ROUNDING += ("environment/wait",)
TABLE = {
    "synchronous": Row(
        "ppo",
        (
            End("hybridflow.models.staged_step:StagedStep._step_some", 7, rank="1", overrides=STAGED),
            PLACES["row of metrics"].at(2, overrides=IN_BACKGROUND),
            TOLD.at(2, rank="1"),  # one iteration is whole before: there are two checkpoints
        ),
        damaged=True,
    ),
    "save": Row("grpo", SAVES, 7),
    "full disk": Row(
        "ppo",
        (
            PLACES["row of metrics"].at(2),
            End(disk="size=24m", said=FULL),  # a checkpoint has 14 MB: the first fits, the second does not
            # nobody foresees it, and the run goes on
            End(ROOM, 1, what="nothing", overrides=GOES_ON, said="No space left on device"),
            End(disk="remount,ro", said="Read-only file system"),
        ),
    ),
    "one step off": Row(
        "one step off",
        (
            End("hybridflow.flows.engine_ranks:EngineRanks._respond", 4, rank="1"),
            End("hybridflow.roles.generator:Generator.gather_rollout", 1, overrides=STAGED),
            TOLD,
        ),
        left_out=("reshard/",),
    ),
    # of which the second saves what it began with, when it ends
    "partial": Row(
        "partial",
        (replace(UNDER_WAY, overrides=STAGED), TOLD.at(2, rank="1", overrides=("checkpoint.save_interval=10",))),
    ),
    "routes": Row("routes", (UNDER_WAY,)),
    "environment": Row(
        "environment", (End("hybridflow.environments.conversations:Conversations._go_on", 40),), 2, ROUNDING
    ),
    "agent": Row(
        "agent",
        (GENERATION.at(2, what="ROOT/words/*.pids 4", overrides=(agent(at=5, words="ROOT/words"),)),),
        2,
        ROUNDING,
    ),
    "adapters": Row("lora", (PLACES["tensors"].at(7, overrides=STAGED), PLACES["loading"])),
    "context": Row("context", (PLACES["hand-off"].at(3),)),
    "leftover": Row("leftover", (PLACES["update"].at(5),)),
}
EVERYWHERE = ("ppo", "grpo", "lora", "context", "leftover", *FLOWS)  # whose ranks all train


def every_place(run: str) -> Row:
    """The first of them when there are checkpoints, to load and to remove."""
    chance = random.Random(run)
    ends = [end.at(chance.randint(1, 2 * end.number)) for name, end in PLACES.items() if name != "loading"]
    return Row(run, (PLACES["row of metrics"].at(3), PLACES["loading"], *ends), 24)


# ------------------------------------------------------------------------------------------------ what is left


def rows(run: Path, left_out: tuple[str, ...] = (), first: int = 0) -> list[dict[str, str]]:
    """Of metrics.csv from iteration `first` on, without costs."""
    with (run / "metrics.csv").open(newline="") as file:
        found = [row for row in csv.DictReader(file) if int(row["iteration"]) >= first]
    return [
        {name: x for name, x in row.items() if not any(part in name for part in (*COSTS, *left_out))} for row in found
    ]


def tensors(run: Path, iteration: int) -> dict[str, Any]:
    """Of a checkpoint: size and checksum of what all ranks have written, and the rows that it holds."""
    step = run / "checkpoints" / step_name(iteration)
    files = {name: its for name, its in read_manifest(step).files.items() if name.endswith(".distcp")}
    assert files
    held = {file.name: load_file(file) for file in step.glob("*.safetensors")}
    return files | {
        f"{file} {name}": x.tolist() for file, found in held.items() for name, x in found.items() if name != "report"
    }


def damage_newest(run: Path) -> None:
    """Four bytes in the middle of a file of the actor."""
    file = max((run / "checkpoints").glob("step_*/actor/*.distcp"))
    with file.open("r+b") as written:
        written.seek(file.stat().st_size // 2)
        written.write(b"????")


def batches(run: Path) -> list[dict[str, torch.Tensor]]:
    return [load_file(file) for file in sorted((run / "batches").iterdir())]
