"""Dumped batches in the engine's place: the same numbers and weights again; and runs that train nothing."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridflow.batch import PromptBatch, RolloutBatch
from hybridflow.cli import train
from hybridflow.config import ExperimentConfig
from hybridflow.config.length_buckets import LengthBuckets, always
from hybridflow.errors import DataError
from hybridflow.flows.replay import FIELDS, Replay, differences, dumped_batches, read_batch
from hybridflow.models.routing import RoutingSizes
from hybridflow.parallel.layout import Layout, RolloutLayout
from hybridflow.rollout.routing_records import RoutingRecords
from hybridflow.trainers.online import config_for_inspection
from tests.distributed.test_determinism import MEASURED
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import run_ranks

NUM_ITERATIONS = 2

# ------------------------------------------------------------------------------------------------ files


def prompts() -> PromptBatch:
    """Two: 5 6 and 7."""
    return PromptBatch(torch.tensor([5, 6, 7]), torch.tensor([2, 1]), ("one", "two"), {})


def batch() -> dict[str, Tensor]:
    """Two responses to each: 5 6 | 8 9, 5 6 | 9, 7 | 8, 7 | 8 9 9; with what PPO computes of them."""
    lengths, prompt_lengths = torch.tensor([4, 3, 2, 4]), torch.tensor([2, 2, 1, 1])
    return {
        "input_ids": torch.tensor([5, 6, 8, 9, 5, 6, 9, 7, 8, 7, 8, 9, 9]),
        "lengths": lengths,
        "prompt_lengths": prompt_lengths,
        "prompt_indices": torch.tensor([0, 0, 1, 1]),
        "truncated": torch.tensor([False, True, False, False]),
        "response_mask": torch.tensor([0, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 1, 1], dtype=torch.bool),
        "rollout_log_probs": torch.linspace(-1, 0, 13),
        "log_probs": torch.linspace(-1, 0, 13),
    }


def generated(
    file: Path, tensors: dict[str, Tensor] | None = None, records: RoutingRecords | None = None
) -> RolloutBatch:
    if tensors is not None:
        save_file(tensors, file)
    replay = Replay({3: file}, vocab_size=10, max_length=4, records=records)
    return replay.rollout(prompts(), always(2), 3)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "iteration_000003.safetensors"


def test_a_file_gives_the_rollout_that_it_holds(file: Path) -> None:
    rollout = generated(file, batch())
    assert set(rollout.tensors()) == set(batch()) - {"log_probs"}
    assert all(torch.equal(x, batch()[name]) for name, x in rollout.tensors().items())


ROUTING = RoutingSizes(num_layers=3, chosen=2, num_experts=4)


def test_versions_are_read_where_the_run_had_stale_rollouts(file: Path) -> None:
    tensors = batch()
    versions = torch.arange(len(tensors["input_ids"]), dtype=torch.int32)[:, None]
    save_file({**tensors, "versions": versions}, file)
    assert generated(file).versions.tolist() == versions.tolist()
    save_file({**tensors, "versions": versions[1:]}, file)
    with pytest.raises(DataError, match=r"versions is torch.int32 of shape \(12, 1\); expected int32 \(13, 1\)"):
        generated(file)


def records_of_one_rank() -> RoutingRecords:
    exchange: Any = object()  # nobody else is there
    layout, engines = Layout(1, 1, 1, (0,)), (RolloutLayout(1, 1, ((0,),)), (tuple(range(ROUTING.num_layers)),))
    return RoutingRecords(ROUTING, layout, rank=0, world=exchange, replicas=exchange, engines=engines)


EXPERTS = torch.rand(13, 3, 4, generator=torch.Generator().manual_seed(0)).topk(2).indices.to(torch.uint8)


def test_a_file_gives_the_experts_that_it_holds_where_they_are_replayed(file: Path) -> None:
    whole, records = batch() | {"routed_experts": EXPERTS}, records_of_one_rank()
    taken = generated(file, whole, records)
    assert torch.equal(records.of_rows(taken, [0, 1, 2, 3]).for_tokens(torch.arange(13)).experts, EXPERTS)
    rollout = generated(file, whole)
    assert rollout.record_ids is None and differences(whole, vars(rollout)) == ["log_probs not computed now"]


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (None, r"has no routed_experts: algorithm.policy.replay_routing = true replays those of the engine"),
        (EXPERTS.short(), r"routed_experts is torch.int16 of shape \(13, 3, 2\); expected torch.uint8 \(13, 3, 2\)"),
        (EXPERTS[:12], r"routed_experts is torch.uint8 of shape \(12, 3, 2\); expected torch.uint8 \(13, 3, 2\)"),
        (EXPERTS[:, :2], r"routed_experts is torch.uint8 of shape \(13, 2, 2\); expected"),
        (EXPERTS + 1, r"routed_experts\[[0-9]+\] is 4; this config has those from 0 to 3"),
    ],
)
def test_experts_of_another_model_are_refused(experts: Tensor | None, message: str, file: Path) -> None:
    tensors = batch() | ({} if experts is None else {"routed_experts": experts.contiguous()})
    with pytest.raises(DataError, match=f"^{file}: {message}"):
        generated(file, tensors, records_of_one_rank())


def test_prompts_may_have_as_many_responses_as_their_length_says(file: Path) -> None:
    """Two to the prompt of 2 tokens, one to that of 1."""
    whole, samples = batch(), LengthBuckets((1,), (1, 2))
    per_row = {name: x[:3] for name, x in whole.items() if len(x) == 4}
    save_file({name: x[:9].clone() for name, x in whole.items()} | per_row, file)
    replay = Replay({3: file}, vocab_size=10, max_length=4)
    rollout = replay.rollout(prompts(), samples, 3)
    assert rollout.prompt_indices.tolist() == [0, 0, 1] and rollout.input_ids.tolist() == [5, 6, 8, 9, 5, 6, 9, 7, 8]
    with pytest.raises(DataError, match=r"not those of 2 prompts .* x 1 to 2 responses"):
        replay.rollout(prompts(), LengthBuckets((1,), (2, 1)), 3)


STARTS = torch.zeros(13, dtype=torch.bool).index_fill(0, torch.tensor([11]), True)


def test_rows_of_several_sequences_are_read_where_the_config_has_them(file: Path) -> None:
    """The last one, of four tokens, has two sequences of two."""
    mask = batch()["response_mask"] & ~STARTS
    save_file(batch() | {"branch_starts": STARTS, "response_mask": mask}, file)
    given = {"vocab_size": 10, "max_length": 4}
    rollout = Replay({3: file}, **given, several=True).rollout(prompts(), always(2), 3)
    assert rollout.branch_lengths.tolist() == [4, 3, 2, 2, 2]
    with pytest.raises(DataError, match=r"several sequences, which need data.environment.earlier_turns: branch"):
        Replay({3: file}, **given).rollout(prompts(), always(2), 3)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"branch_starts": STARTS}, r"branch_starts marks a row's first token, or one that the policy chose"),
        ({"branch_starts": STARTS.roll(2)}, r"branch_starts marks a row's first token, or one that the policy chose"),
        ({"branch_starts": STARTS[1:].clone()}, r"branch_starts has 12 entries; expected 13, one a token"),
        ({"branch_starts": STARTS.long()}, r"branch_starts is torch.int64 of shape \(13,\); expected torch.bool"),
    ],
)
def test_sequences_that_make_no_sense_are_refused(tensors: dict[str, Tensor], message: str, file: Path) -> None:
    save_file(batch() | tensors, file)
    replay = Replay({3: file}, vocab_size=10, max_length=4, several=True)
    with pytest.raises(DataError, match=message):
        replay.rollout(prompts(), always(2), 3)


def test_a_row_of_one_sequence_has_the_limit_also_where_the_file_tells_sequences(file: Path) -> None:
    save_file(batch() | {"branch_starts": torch.zeros_like(STARTS)}, file)
    with pytest.raises(DataError, match=r"lengths of sequences\[0\] is 4; this config has those from 1 to 3"):
        Replay({3: file}, vocab_size=10, max_length=3, several=True).rollout(prompts(), always(2), 3)


def changed(name: str, value: Callable[[Tensor], Tensor] | None) -> dict[str, Tensor]:
    tensors = batch()
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value(tensors[name]).contiguous()
    return tensors


def put(at: int, value: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.index_fill(0, torch.tensor([at]), value)


BAD = {
    "missing": (changed("truncated", None), r"has no truncated: a dumped batch has input_ids, lengths"),
    "dtype": (
        changed("input_ids", Tensor.int),
        r"input_ids is torch.int32 of shape \(13,\); expected torch.int64 \(n,\)",
    ),
    "shape": (changed("lengths", lambda x: x[None]), r"lengths is torch.int64 of shape \(1, 4\); expected"),
    "too few tokens": (
        changed("rollout_log_probs", lambda x: x[:-1]),
        r"rollout_log_probs has 12 entries; expected 13",
    ),
    "too few rows": (changed("truncated", lambda x: x[1:]), r"truncated has 3 entries; expected 4, one a sequence"),
    "an empty row": (changed("lengths", put(1, 0)), r"lengths\[1\] is 0; this config has those from 1 to 4"),
    "a long row": (changed("lengths", put(0, 5)), r"lengths\[0\] is 5; this config has those from 1 to 4"),
    "a token": (changed("input_ids", put(3, 10)), r"input_ids\[3\] is 10; this config has those from 0 to 9"),
    "a prompt's length": (
        changed("prompt_lengths", put(2, 3)),
        r"prompt_lengths of row 2 is 3; expected 1 to its length 2",
    ),
    "the mask": (changed("response_mask", put(4, 1)), r"response_mask marks tokens of a prompt"),
    "the prompts' order": (
        changed("prompt_indices", put(1, 1)),
        r"prompt_indices of the 4 rows are not those of 2 prompts",
    ),
    "another prompt": (changed("input_ids", put(7, 6)), r"row 2 begins with 1 tokens that are not prompt 1 of .*'two'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_batch_of_these_prompts_is_refused(name: str, file: Path) -> None:
    tensors, message = BAD[name]
    with pytest.raises(DataError, match=f"^{file}: {message}"):
        generated(file, tensors)


def test_a_file_that_is_cut_anywhere_is_refused(file: Path) -> None:
    save_file(batch(), file)
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(DataError, match=f"^{file}: "):
            read_batch(file)
    with pytest.raises(DataError, match="no such file"):
        read_batch(file.with_name("absent.safetensors"))


def test_batches_are_found_in_a_run_a_folder_or_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "batches"
    folder.mkdir(parents=True)
    for name in ("iteration_000010", "iteration_000002", "nonfinite_000003", "iteration_1"):
        (folder / f"{name}.safetensors").write_bytes(b"")
    (folder / "iteration_000004.partial").write_bytes(b"")
    assert list(dumped_batches(tmp_path / "run")) == list(dumped_batches(folder)) == [1, 2, 10]
    file = folder / "iteration_000002.safetensors"
    assert dumped_batches(file) == {2: file}
    with pytest.raises(DataError, match=r"nonfinite_000003.safetensors: is no dumped batch"):
        dumped_batches(folder / "nonfinite_000003.safetensors")
    with pytest.raises(DataError, match=f"^{tmp_path}: holds no iteration_NNNNNN.safetensors"):
        dumped_batches(tmp_path)
    with pytest.raises(DataError, match=f"^{tmp_path / 'absent'}: does not exist"):
        dumped_batches(tmp_path / "absent")
    replay = Replay(dumped_batches(folder), vocab_size=1, max_length=1)
    assert replay.iterations(9) == [1, 2] and replay.iterations(10, after=1) == [2, 10]
    told = r"belong to iterations 1 to 10, but the run needs 11 to num_iterations = 12"
    with pytest.raises(DataError, match=f"^{folder}: the dumped batches {told}"):
        replay.iterations(12, after=10)


def test_differences_are_the_largest_of_each_field() -> None:
    nan, inf = float("nan"), float("inf")
    then = {
        "input_ids": torch.tensor([1]),
        "alike": torch.tensor([nan, inf, 1.0]),
        "values": torch.tensor([1.0, 2.0, -3.0]),
        "broken": torch.tensor([1.0, 2.0]),
        "marks": torch.tensor([True, False]),
        "gone": torch.zeros(1),
        "cut": torch.zeros(2),
        "empty": torch.zeros(0),
    }
    now = {
        **then,
        "input_ids": torch.tensor([2]),
        "values": torch.tensor([1.0, 2.5, -3.125]),
        "broken": torch.tensor([1.0, nan]),
        "marks": torch.tensor([True, True]),
        "cut": torch.zeros(3),
        "new": torch.zeros(1),
    }
    del now["gone"]
    assert differences(then, now) == [
        "alike 0",
        "values 0.5",
        "broken nan",
        "marks 1",
        "gone not computed now",
        "cut (2,) in the file, (3,) now",
        "empty 0",
        "new not in the file",
    ]


def test_what_looks_into_a_run_has_a_directory_of_its_own_and_starts_anew(tmp_path: Path) -> None:
    overrides = ["checkpoint={save_interval: 5}", "data.heldout=x", "metrics={eval_interval: 2, eval_reward: 'a:b'}"]
    config = ExperimentConfig.from_yaml(write_config(tmp_path / "config.yaml", tmp_path), overrides)
    assert config_for_inspection(config, replay=None, rollout_only=False) is config
    replay = config_for_inspection(config, replay=tmp_path, rollout_only=False)
    rollout = config_for_inspection(config, replay=None, rollout_only=True)
    assert (replay.run_dir, rollout.run_dir) == (tmp_path / "run-replay", tmp_path / "run-rollout")
    assert (replay.metrics.eval_interval, rollout.metrics.eval_interval) == (0, 2)
    assert (replay.metrics.dump_batches, rollout.metrics.dump_batches) == (False, True)
    for found in (replay, rollout):
        assert (found.checkpoint.save_interval, found.checkpoint.load) == (0, "none")
    given = ExperimentConfig.from_yaml(tmp_path / "config.yaml", ["checkpoint.load=runs/x"])
    assert config_for_inspection(given, replay=tmp_path, rollout_only=False).checkpoint.load == "runs/x"


def test_a_replay_and_a_rollout_exclude_each_other(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        train.main(["config.yaml", "--replay", "runs/x", "--rollout-only"])
    assert "not allowed with argument" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_inputs(tmp_path_factory.mktemp("replay"))
    config = json.loads(write_config(root / "config.yaml", root).read_text())
    for name in ("actor", "critic"):
        config[name]["optimizer"] |= {"schedule": "linear", "min_lr": 5e-4}
    config["algorithm"]["kl"] = {"controller": "adaptive"}  # there is a state beside the weights
    config["data"]["heldout"] = str(root / "heldout.jsonl")
    config["metrics"] |= {"eval_interval": 2, "eval_reward": "hybridflow.rewards:exact_match"}
    (root / "config.yaml").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="module")
def output(root: Path) -> str:
    return run_ranks(2, "tests.flows.replay_worker", root / "config.yaml", root / "out.json").stdout


@pytest.fixture(scope="module")
def weights(root: Path, output: str) -> dict[str, dict[str, str]]:
    """By run, after each iteration, of rank 0."""
    return json.loads((root / "out.json").read_text())


def rows(run_dir: Path) -> list[dict[str, str]]:
    """What metrics.csv has of each iteration, without what is measured or of the engine, or of held-out prompts."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    apart = ("reshard/", "eval/", "memory/", "speed/", "time/", "rollout/kv_cache_use", "rollout/preemptions")
    return [
        {name: cell for name, cell in row.items() if not (MEASURED.fullmatch(name) or name.startswith(apart))}
        for row in found
        if row["iteration"] != "0"
    ]


def compared(output: str, iteration: int) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(f"iteration {iteration}: largest differences to ")]


def names(run_dir: Path) -> set[str]:
    return {path.name for path in run_dir.iterdir()}


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_replay_gives_the_metrics_and_weights_of_the_run(root: Path, weights: dict, output: str) -> None:
    """To the last bit, without vLLM."""
    run, replayed = rows(root / "run"), rows(root / "run-replay")
    assert [row["iteration"] for row in run] == ["1", "2"]
    assert replayed == run and {"actor/loss", "critic/grad_norm", "kl/coef", "actor/lr"} <= set(run[0])
    assert weights["replayed"] == weights["run"]
    assert len(set(weights["run"].values())) == 1 + NUM_ITERATIONS  # each has moved them
    for iteration in (1, 2):
        file = root / "run" / "batches" / f"iteration_{iteration:06d}.safetensors"
        fields = [name for name in load_file(file) if name not in FIELDS]
        line, *_ = compared(output, iteration)  # with the run's own weights; later replays begin with others
        assert str(file) in line
        assert sorted(line.partition("safetensors: ")[2].split(", ")) == sorted(f"{name} 0" for name in fields)


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_replay_leaves_the_run_alone_and_writes_no_model(root: Path, weights: dict, output: str) -> None:
    assert {"hf", "metrics.csv", "batches"} <= names(root / "run") and not (root / "run.1").exists()
    assert "hf" not in names(root / "run-replay")
    assert "nothing is generated, held-out prompts are not evaluated, and no model is written" in output
    with (root / "run-replay" / "metrics.csv").open() as file:
        assert "eval/accuracy" not in file.readline()


@pytest.mark.thorough
@pytest.mark.distributed
def test_one_iteration_is_replayed_with_its_own_rate_and_prompts(root: Path, weights: dict, output: str) -> None:
    """Beginning with other weights than it had: what is computed of it differs, and that is told."""
    (row,) = rows(root / "second-replay")
    assert (row["iteration"], row["actor/lr"]) == ("2", rows(root / "run")[1]["actor/lr"])
    assert weights["second"]["start"] == weights["run"]["start"] and list(weights["second"]) == ["start", "2"]
    _, line, *_ = compared(output, 2)  # the first is of the replay of both iterations
    told = dict(part.split(" ") for part in line.partition("safetensors: ")[2].split(", "))
    assert float(told["log_probs"]) > 1e-4 and float(told["values"]) > 1e-4
    assert float(told["ref_log_probs"]) == float(told["raw_scores"]) == 0.0


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["grpo", "direct_step"])
def test_what_was_rolled_out_is_trained_on_in_a_replay(name: str, root: Path, weights: dict, output: str) -> None:
    """Of other algorithms, one a user's own: computed alike, and then each iteration takes its step.

    GRPO's step tells its old log-probs: in the run that took none those rows were beside others in products.
    """
    assert weights[f"{name}_replayed"]["start"] == weights[name]["start"]
    assert len(set(weights[f"{name}_replayed"].values())) == 1 + NUM_ITERATIONS
    (line,) = [line for line in compared(output, 1) if str(root / f"{name}-rollout") in line]
    told = dict(part.split(" ") for part in line.partition("safetensors: ")[2].split(", "))
    assert {"log_probs", "advantages"} <= set(told)
    assert {value for field, value in told.items() if field != "log_probs"} <= {"0"}
    assert float(told["log_probs"]) <= (1e-4 if name == "grpo" else 0.0)


@pytest.mark.thorough
@pytest.mark.distributed
def test_what_no_file_holds_is_told(root: Path, weights: dict) -> None:
    assert "the flow asks for greedy responses, which no file has" in weights["greedy"]["error"]
    assert "iteration_000001.safetensors: row 0 begins with " in weights["other_prompts"]["error"]
    assert "had another config, or its flow kept only some rows" in weights["kept_replayed"]["error"]


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["ppo", "grpo", "direct_step"])
def test_a_rollout_trains_nothing(name: str, root: Path, weights: dict, output: str) -> None:
    assert set(weights[name]) == {"start", "1", "2"} and len(set(weights[name].values())) == 1
    run_dir = root / f"{name}-rollout"
    assert "hf" not in names(run_dir) and len(names(run_dir / "batches")) == NUM_ITERATIONS
    columns = set(rows(run_dir)[0])
    assert "rollout/response_length_mean" in columns
    assert not {x for x in columns if x.startswith(("actor/", "critic/")) and x != "critic/explained_variance"}
    assert "rollout only: nothing is trained, and no model is written" in output


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_rollout_scores_as_the_run_does(root: Path, weights: dict) -> None:
    """And steers nothing: the coefficient of the KL is for updates."""
    assert [row["kl/coef"] for row in rows(root / "ppo-rollout")] == ["0.05", "0.05"]
    assert len({row["kl/coef"] for row in rows(root / "run")}) == 2
    first = "batches/iteration_000001.safetensors"
    found, expected = load_file(root / "ppo-rollout" / first), load_file(root / "run" / first)
    assert found.keys() == expected.keys() and "advantages" in found
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_replay_by_command_on_another_number_of_ranks(root: Path, weights: dict) -> None:
    copied = shutil.copytree(root / "run", root / "copied")
    arguments = ["name=single", "actor.tensor_parallel_size=1", "--replay", copied, "--num-iterations", "1"]
    done = run_ranks(1, "hybridflow.train", root / "config.yaml", *arguments)
    assert "hybridflow single-replay" in done.stdout and "trained model" not in done.stdout
    (row,) = rows(root / "single-replay")
    assert float(row["actor/loss"]) == pytest.approx(float(rows(root / "run")[0]["actor/loss"]), abs=1e-5)
