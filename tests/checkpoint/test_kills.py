"""Ranks of real runs are killed, again and again, wherever they are: what is left in the end is what an undisturbed run
leaves, bit for bit: every metric that is no time or memory, every weight, every moment of the optimizers.
"""

import csv
import json
import random
from pathlib import Path

import pytest

from hybridflow.checkpoint.store import read_manifest
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import run_ranks

pytestmark = pytest.mark.distributed

COSTS = (
    "time/",
    "kv_cache_use",
    "speed/",
    "memory/",
    "reshard/seconds",
    "_per_sec",
    "_ms",
)  # what no two runs have alike
NUM_ITERATIONS = 14  # more than what the kills leave between them
RUNNING = ["checkpoint.save_interval=1", "reward.normalization=running", f"num_iterations={NUM_ITERATIONS}"]
GRPO = {"name": "grpo", "update": {"mini_batch_size": 4}}
ALGORITHMS = {
    "ppo": ["algorithm.kl.controller=adaptive", "algorithm.update.epochs=2"],  # tp 2, the critic dp 2
    "grpo": [  # two replicas in bfloat16: main weights in float32, all of the optimizer split by ZeRO-1
        *("critic=null", "algorithm=" + json.dumps(GRPO), "sampling.samples_per_prompt=2"),
        *("actor.tensor_parallel_size=1", "actor.dtype=bfloat16"),
    ],
}
ALGORITHMS["lora"] = [  # of adapters alone; the reference is the actor with the adapters of some iterations ago
    *("actor.lora={rank: 4}", "critic.lora={rank: 2}", "reference=null"),
    *("algorithm.kl.controller=adaptive", "algorithm.kl.reset_reference_interval=3"),
]
ALGORITHMS["context"] = [  # two ranks share the tokens of rows that are longer than 10
    *("critic=null", "algorithm=" + json.dumps(GRPO), "sampling.samples_per_prompt=2", "actor.micro_batch_tokens=20"),
    *("actor.tensor_parallel_size=1", "actor.context_parallel_size=2"),
]
FIRST = "0"  # the rank that makes checkpoints of what all have written
# where: (module:function, rank or None for any, calls of it in an iteration, whether later than the call)
PLACES = {
    "loading": ("hybridflow.checkpoint.resume:load", None, 1, False),
    "hand-off": ("hybridflow.reshard.execute:WeightReshard.to_engine", None, 1, False),
    "generation": ("hybridflow.roles.generator:Generator.generate", None, 1, True),
    "scoring": ("hybridflow.flows.run:Run.whole", None, 1, True),
    "update": ("hybridflow.models.optimizer:TrainedModel.step", None, 2, True),
    "row of metrics": ("hybridflow.recording.writers:MetricsWriter.write", FIRST, 1, False),
    "state": ("hybridflow.checkpoint.writer:write_state", FIRST, 1, False),
    "tensors": ("hybridflow.checkpoint.writer:write_records", None, 1, False),
    "middle of tensors": ("hybridflow.formats.distributed_storage:_save", None, 20, False),
    "metadata": ("hybridflow.checkpoint.writer:finish_save", FIRST, 1, False),
    "manifest": ("hybridflow.checkpoint.store:_write_manifest", FIRST, 1, False),
    "rename": ("hybridflow.checkpoint.store:replace_directory", FIRST, 1, False),
    "between rename and pointer": ("hybridflow.checkpoint.store:point_to", FIRST, 1, False),
    "removal of old ones": ("hybridflow.checkpoint.writer:remove", FIRST, 1, False),
    "middle of a removal": ("hybridflow.checkpoint.store:shutil.rmtree", FIRST, 1, False),
    "anywhere": ("hybridflow.trainers.online:OnlineTrainer.iterate", None, 1, True),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


# Each place once: where a rank dies and what is trained do not depend on each other. One of its own, of the default
# set: what counts then is that the run goes on at all.
ORDER = random.Random(0).sample(sorted(PLACES), len(PLACES))
TURNS = {
    "ppo": ORDER[0::2],
    "grpo": ORDER[1::2],
    "ppo, twice": ["update", "between rename and pointer"],
    "lora": ["update", "tensors", "loading", "rename"],
    "context": ["update", "tensors"],
}


@pytest.mark.parametrize(
    "turn", [pytest.param(turn, marks=() if turn == "ppo, twice" else pytest.mark.thorough) for turn in TURNS]
)
def test_a_run_whose_ranks_are_killed_ends_as_any_other(turn: str, inputs: Path, tmp_path: Path) -> None:
    config, places = write_config(tmp_path / "config.yaml", inputs), TURNS[turn]
    overrides = [*RUNNING, *ALGORITHMS[turn.partition(",")[0]]]
    start(config, [*overrides, "name=undisturbed"])
    disturbed, chance, kills = [*overrides, "name=killed"], random.Random(turn), []
    start(config, [*disturbed, "num_iterations=3"])  # there is something to load, and something to remove
    for place in places:
        in_background = chance.random() < 0.5
        saving = f"checkpoint.async_save={json.dumps(in_background)}"
        if killed(config, [*disturbed, saving], place, chance):
            kills.append((place, in_background))
    assert len(kills) >= len(places) - 1, f"the others were not reached: {kills}"
    start(config, disturbed)
    assert rows(tmp_path / "killed") == rows(tmp_path / "undisturbed")
    assert tensors(tmp_path / "killed") == tensors(tmp_path / "undisturbed")
    assert not list((tmp_path / "killed" / "checkpoints").glob(".*")), "nothing is left of what did not become one"


def start(config: Path, overrides: list[str], kill: tuple[str, ...] = (FIRST, "", "0", "0")) -> int:
    """The exit status; a run that nobody disturbs ends well."""
    undisturbed = kill[2] == "0"
    return run_ranks(2, "tests.checkpoint.killed_worker", *kill, config, *overrides, check=undisturbed).returncode


def killed(config: Path, overrides: list[str], place: str, chance: random.Random) -> bool:
    """Whether a rank was killed there; in the first iteration of the start or the next."""
    function, rank, calls, later = PLACES[place]
    number = 1 if place == "loading" else chance.randint(1, 2 * calls)
    seconds = round(chance.uniform(0.0, 0.4), 3) if later else 0
    return start(config, overrides, (rank or chance.choice("01"), function, str(number), str(seconds))) != 0


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["iteration"] for row in found] == [str(i) for i in range(1, NUM_ITERATIONS + 1)]
    return [{name: x for name, x in row.items() if not any(part in name for part in COSTS)} for row in found]


def tensors(run: Path) -> dict[str, object]:
    """Size and checksum of the files of all ranks in the last checkpoint."""
    files = read_manifest(run / "checkpoints" / f"step_{NUM_ITERATIONS:06d}").files
    found = {name: its for name, its in files.items() if name.endswith(".distcp")}
    assert found
    return found
