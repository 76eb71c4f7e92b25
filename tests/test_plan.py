"""`python -m hybridflow.plan`: a small case by hand, every kind of layout that cannot work, tables, and 1,024 ranks."""

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.cli.plan import main

ROOT = Path(__file__).resolve().parents[1]
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 60,  # padded to 64
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}
MODELS = {
    "small": {},
    "reward": {"architectures": ["LlamaForSequenceClassification"]},
    "other_tokens": {"vocab_size": 30},
    "four_layers": {"num_hidden_layers": 4},
    "three_heads": {"num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 96, "vocab_size": 192},
}
CONFIG: dict[str, Any] = {
    "name": "small",
    "num_iterations": 1,
    "data": {"train": "train.jsonl", "prompts_per_iteration": 8, "max_prompt_length": 6},
    "sampling": {"max_response_length": 4},
    "actor": {"model": "small", "optimizer": {"lr": 1e-5}},
    "critic": {"model": "small", "optimizer": {"lr": 1e-5}},
    "reference": {"model": "small"},
    "reward": {"models": [{"model": "reward"}]},
    "algorithm": {"update": {"mini_batch_size": 8}},
}
BLOCK = 32 * 2 * 2 * 2 * 4 * 2  # of the KV cache: tokens x (keys, values) x layers x heads x head_dim x bytes
ROLES = ("actor", "critic", "reference", "reward.models.0")
TP2_PP2 = ("actor.tensor_parallel_size=2", "actor.pipeline_parallel_size=2", "rollout.tensor_parallel_size=1")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with the models' config.json and config.yaml."""
    for name, changes in MODELS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(SMALL | changes))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(copy.deepcopy(CONFIG)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str) -> dict[str, Any]:
        assert main(["config.yaml", "--json", *arguments]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def errors(capsys: pytest.CaptureFixture[str]):
    def run(*arguments: str) -> list[str]:
        assert main(["config.yaml", *arguments]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        lines = captured.err.splitlines()
        assert all(line.startswith("hybridflow.plan: error: ") for line in lines)
        return [line.removeprefix("hybridflow.plan: error: ") for line in lines]

    return run


# ------------------------------------------------------------------------------------------------ by hand

# Elements: embedding and output layer 64 x 8 = 512 each, a layer 2 x 8 + 24 x 8 + 8 x 8 + 32 x 8 + 8 x 16 = 656, final
# norm 8; cut in two a layer is 16 + 320. A rank of stage 0 holds 256 + 336 = 592, of stage 1 336 + 8 + 256 = 600.
MODEL, STAGE_0, STAGE_1 = 512 + 2 * 656 + 8 + 512, 592, 600


def test_tp2_pp2_to_tp1_by_hand(plan) -> None:
    found = plan(*TP2_PP2)
    assert (found["world_size"], found["smallest_that_fits"]) == (4, True)
    reshard = found["reshard"]
    assert reshard["model_bytes"] == 2 * MODEL
    received = [2 * (MODEL - STAGE_0), 2 * (MODEL - STAGE_1)]  # every rank needs the whole model
    spread = {"min": received[1], "max": received[0], "mean": sum(received) // 2, "total": 2 * sum(received)}
    assert reshard["received_bytes"] == reshard["lower_bound_bytes"] == spread
    # to each of 3 others what is split, 576 elements; norms, 16 and 24 elements, to the other stage alone
    assert reshard["sent_bytes"]["min"] == 2 * (3 * 576 + 16)
    assert reshard["sent_bytes"]["max"] == 2 * (3 * 576 + 24)
    assert reshard["sent_bytes"]["total"] == spread["total"]
    assert reshard["hybridflow_bytes"] == reshard["deepspeed_chat_bytes"] == 3 * 2 * MODEL // 4
    # of 15 weights only the norms of the own stage are there whole: 2 of stage 0, 3 of stage 1
    assert reshard["ways"]["alias"] == {"parameters": 2 * 2 + 2 * 3, "bytes": 2 * (2 * 16 + 2 * 24)}
    assert reshard["ways"]["permute"] == {"parameters": 0, "bytes": 0}
    assert reshard["ways"]["gather"]["parameters"] == 4 * 15 - 10


def test_the_peak_of_one_bucket_by_hand(plan) -> None:
    """All weights in one bucket: training shards, the engine's shards (each from a multiple of 64 on) and both buffers.

    Stage 0 ends with the engine's shards alone, its training storage released: the shards and the buffers are extra.
    A rank sends its 576 split elements to two ranks, packed once, and them with the norms to the third.
    """
    own = 2 * (2 * 512 + 2 * (2 * 64 + 192 + 64 + 256 + 128) + 64)
    assert own == 5248
    reshard, memory = plan(*TP2_PP2)["reshard"], plan(*TP2_PP2)["memory"]["generation"]["roles"]
    buffers = [2 * (MODEL - held + 2 * 576 + norms) for held, norms in ((STAGE_0, 16), (STAGE_1, 24))]
    extra = [2 * held + size for held, size in zip((STAGE_0, STAGE_1), buffers, strict=True)]
    assert (reshard["peak_extra_bytes"]["min"], reshard["peak_extra_bytes"]["max"]) == tuple(extra)
    assert reshard["num_buckets"] == 1
    assert (memory["engine"]["weights"], memory["actor"]["weights"]) == (own, 0)


def test_memory_by_hand(plan) -> None:
    memory = plan(*TP2_PP2)["memory"]
    actor = memory["training"]["roles"]["actor"]
    assert (actor["rank"], actor["weights"], actor["gradients"]) == (2, 2 * STAGE_1, 4 * STAGE_1)
    assert actor["optimizer"] == 12 * STAGE_1
    critic = memory["training"]["roles"]["critic"]  # whole on each of 4 replicas: no output layer, a value head
    assert (critic["weights"], critic["optimizer"]) == (2 * (MODEL - 512 + 8), 12 * (MODEL - 512 + 8) // 4)
    reference = memory["training"]["roles"]["reference"]
    assert (reference["weights"], reference["gradients"], reference["optimizer"]) == (2 * MODEL, 0, 0)
    worst = memory["training"]["worst_rank"]
    assert worst["roles"] == ["actor", "critic", "reference", "reward.models.0"]
    assert worst["weights"] == 2 * (STAGE_1 + MODEL + 2 * (MODEL - 512 + 8))
    assert worst["activations"] == max(row["activations"] for row in memory["training"]["roles"].values())
    assert worst["kv_cache"] == 0
    assert memory["generation"]["roles"]["engine"]["kv_cache"] == (2 + 1) * BLOCK  # two prompts on each of 4 replicas


def test_what_is_offloaded_is_not_there_during_generation(plan) -> None:
    keys = ("actor.offload_optimizer=true", "actor.offload_gradients=true", "critic.offload_optimizer=true")
    roles = plan(*keys)["memory"]["generation"]["roles"]
    assert [roles["actor"][kind] for kind in ("gradients", "optimizer", "activations")] == [0, 0, 0]
    assert (roles["critic"]["gradients"] > 0, roles["critic"]["optimizer"]) == (True, 0)


def test_a_cache_that_does_not_sleep_is_there_in_training(plan) -> None:
    training = plan("rollout.sleep_level=0")["memory"]["training"]
    assert training["roles"]["engine"]["kv_cache"] == training["worst_rank"]["kv_cache"] == (8 + 1) * BLOCK


def test_the_sampler_of_the_newer_model_runner_is_counted(plan):
    """256 sequences x (60 counts and 2 words of bits) x 4 bytes; a pipeline of stages has the older one."""
    few, many = (plan(f"rollout.max_num_seqs={count}")["memory"]["generation"]["roles"]["engine"] for count in (1, 256))
    pipeline = plan("rollout.max_num_seqs=256", *TP2_PP2, "rollout.pipeline_parallel_size=2")["memory"]["generation"]
    logits = 4 * 256 * 64
    step = few["activations"] - 1 * 62 * 4  # of the most tokens that a step may have
    assert many["activations"] == max(step, logits) + 256 * 62 * 4
    assert pipeline["roles"]["engine"]["activations"] == max(step, logits)
    asleep = plan("rollout.sleep_level=0")["memory"]["training"]["roles"]["engine"]
    assert asleep["activations"] == 256 * 62 * 4
    chosen = plan("rollout.sleep_level=0", "sampling.samples_per_prompt=50")["memory"]["training"]["roles"]["engine"]
    assert chosen["activations"] == 400 * 62 * 4  # of 8 prompts


def test_one_copy_where_nothing_moves(plan) -> None:
    """tp 1 everywhere: norms, projections and vocabulary alias; q, k, v of 2 key/value heads are permuted in place."""
    found = plan()
    assert found["world_size"] == 1
    assert found["reshard"]["received_bytes"]["total"] == found["reshard"]["sent_bytes"]["total"] == 0
    assert found["reshard"]["ways"]["permute"] == {"parameters": 2, "bytes": 2 * 2 * 24 * 8}
    assert found["reshard"]["permuted_bytes"]["total"] == 2 * 2 * 24 * 8
    generation = found["memory"]["generation"]["roles"]
    assert (generation["actor"]["weights"], generation["engine"]["weights"]) == (2 * MODEL, 0)
    assert 0 < found["reshard"]["peak_extra_bytes"]["max"] <= 2 * 24 * 8  # a block of one weight


def test_roles_elsewhere_do_not_add_up(plan) -> None:
    apart = ("actor.ranks=0", "reference.ranks=0", "critic.ranks=1", "reward.models.0.ranks=1")
    found = plan(*apart)
    assert found["world_size"] == 2
    training = found["memory"]["training"]
    assert training["worst_rank"]["roles"] == ["actor", "reference"]
    assert training["worst_rank"]["weights"] == 4 * MODEL


def test_an_engine_of_its_own_receives_all_and_no_formula_applies(plan) -> None:
    found = plan("actor.ranks=0-1", "rollout.ranks=2-3", "actor.tensor_parallel_size=2")
    reshard = found["reshard"]
    assert not reshard["colocated"]
    assert reshard["received_bytes"]["total"] == reshard["sent_bytes"]["total"] == reshard["lower_bound_bytes"]["total"]
    engine = found["memory"]["generation"]["roles"]["engine"]["weights"]
    assert reshard["received_bytes"]["max"] <= engine < reshard["received_bytes"]["max"] + 15 * 128  # alignment
    assert reshard["hybridflow_bytes"] is reshard["deepspeed_chat_bytes"] is None
    assert found["memory"]["generation"]["roles"]["actor"]["weights"] == 2 * (512 + 656 + 8 + 16)  # norms whole


# A rank of the actor holds 592 or 600 elements, 16 and 24 of them norms, which the first of each two writes; the critic
# lies whole on four replicas. With 2 bytes of weights and 12 of optimizer state an element:
SAVED = (2 + 12) * (MODEL + MODEL - 512 + 8) + 2 * 8  # and the number of steps of each


def test_a_checkpoint_by_hand(plan) -> None:
    found = plan(*TP2_PP2, "checkpoint.save_interval=2", "num_iterations=10", "checkpoint.keep_best=1")["checkpoint"]
    assert (found["save_interval"], found["async_save"], found["host_bytes"]) == (2, False, None)
    assert found["rank_bytes"]["total"] == SAVED
    assert (found["num_kept"], found["kept_bytes"]) == (4, 4 * SAVED)  # two newest, the best, and the next


def test_a_save_in_the_background_takes_host_memory(plan) -> None:
    """On one rank all of it: it writes all, and copies what it writes."""
    found = plan("checkpoint.async_save=true")["checkpoint"]
    assert found["host_bytes"] == {"min": SAVED, "max": SAVED, "mean": SAVED, "total": SAVED}
    assert (found["num_kept"], found["kept_bytes"]) == (1, SAVED)  # when it is told to stop


def test_ranks_without_a_trained_model_write_nothing(plan) -> None:
    found = plan("actor.ranks=0", "critic.ranks=0", "reference.ranks=1", "reward.models.0.ranks=1")["checkpoint"]
    assert (found["rank_bytes"]["min"], found["rank_bytes"]["max"]) == (0, SAVED)


def test_a_disk_that_cannot_hold_the_checkpoints_is_told(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def notes(free: int) -> list[str]:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, free))
        assert main(["config.yaml", "--all", "checkpoint.save_interval=1", "num_iterations=9"]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if "output_dir" in line]

    assert notes(3 * SAVED) == [f"output_dir = runs has {3 * SAVED / 1024:.2f} KiB free on this machine."]
    room = f"output_dir = runs has {(3 * SAVED - 1) / 1024:.2f} KiB free"
    needed = f"too little for {3 * SAVED / 1024:.2f} KiB."
    assert notes(3 * SAVED - 1) == [f"warning: {room} on this machine: {needed}"]
    old = directory / "runs" / "small" / "checkpoints" / "step_000001"  # goes when newer ones come
    old.mkdir(parents=True)
    (old / "file").write_bytes(b"1")
    assert notes(3 * SAVED - 1) == [f"{room} beside the 1 B of this run's checkpoints on this machine."]


# ------------------------------------------------------------------------------------------------ world size


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), 1),
        (("actor.tensor_parallel_size=2", "critic.pipeline_parallel_size=2"), 2),
        (("actor.data_parallel_size=4",), 4),
        (("critic.ranks=2-3",), 4),
        (("rollout.tensor_parallel_size=2",), 2),
    ],
)
def test_the_smallest_world_size_that_fits(plan, overrides: tuple[str, ...], expected: int) -> None:
    assert plan(*overrides)["world_size"] == expected


def test_a_given_world_size_is_taken(plan) -> None:
    found = plan("--world-size", "4", "actor.tensor_parallel_size=2")
    assert (found["world_size"], found["smallest_that_fits"], found["roles"][0]["dp"]) == (4, False, 2)


# ------------------------------------------------------------------------------------------------ what cannot work


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--world-size", "3", "actor.tensor_parallel_size=2"), ["actor: tensor_parallel_size", "3 = 1 x 2 + 1"]),
        (("actor.tensor_parallel_size=4",), ["actor.tensor_parallel_size = 4", "num_attention_heads = 2"]),
        (("critic.model=three_heads", "critic.tensor_parallel_size=2"), ["critic.tensor_parallel_size = 2", "3 = 1 x"]),
        (("reference.pipeline_parallel_size=3",), ["reference.pipeline_parallel_size = 3", "2 layers cannot be cut"]),
        (
            ("critic.pipeline_parallel_size=2", "critic.virtual_pipeline_parallel_size=2"),
            ["critic.virtual_pipeline_parallel_size = 2", "2 model chunks: 1 = 0 x 2 + 1"],
        ),
        (
            ("actor.model=four_layers", "actor.pipeline_parallel_size=2", "actor.num_layers_in_first_pipeline_stage=4"),
            ["actor.num_layers_in_first_pipeline_stage = 4", "0 are left for 1 equal stages"],
        ),
        (("rollout.tensor_parallel_size=4",), ["rollout.tensor_parallel_size = 4", "num_attention_heads = 2"]),
        (("rollout.pipeline_parallel_size=4",), ["rollout.pipeline_parallel_size = 4", "num_hidden_layers = 2"]),
        (
            ("--world-size", "2", "critic.ranks=2-3"),
            ["critic.ranks = 2-3 names rank 3", "Set critic.ranks=0-1"],
        ),
        (
            ("--world-size", "4", *(f"{role}.ranks=0-1" for role in ROLES)),
            ["uses 2-3, which leaves 2 ranks idle: ", "critic.ranks = 0-1"],
        ),
        (("actor.ranks=1-0",), ["config.yaml: actor.ranks: '1-0': the interval 1-0 is empty"]),
        (("sampling.max_response_length=100",), ["max_position_embeddings = 64 of small"]),
        (("reference.model=other_tokens",), ["reference.model = other_tokens has vocab_size 30"]),
        (("reward.models.0.model=small",), ["reward.models.0.model = small must be a *ForSequenceClassification"]),
        (("actor.model=reward",), ["actor.model = reward must be a *ForCausalLM"]),
        (("critic.model=nowhere",), ["nowhere/config.json: no such file"]),
        (("critic.tensor_paralel_size=2",), ["unknown key; did you mean tensor_parallel_size?"]),
        (
            ("actor.data_parallel_size=16", "algorithm.update.mini_batch_size=8"),
            ["no number of ranks fits", "mini_batch_size"],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_layout_that_cannot_work_is_an_error(errors, arguments: tuple[str, ...], expected: list[str]) -> None:
    lines = errors(*arguments)
    assert any(all(part in line for part in expected) for line in lines), lines


def test_all_reasons_are_told_at_once(errors) -> None:
    wrong = ("actor.tensor_parallel_size=4", "critic.pipeline_parallel_size=3", "critic.model=other_tokens")
    lines = errors(*wrong, "rollout.tensor_parallel_size=12")
    assert [line.partition(" = ")[0] for line in lines] == [
        *("critic.model", "actor.tensor_parallel_size", "critic.pipeline_parallel_size"),
        "rollout.tensor_parallel_size",
    ]


def test_a_model_that_another_run_will_write_is_planned_by_its_base(errors, plan) -> None:
    *others, last = errors("actor.model=runs/dpo/hf")
    assert any("runs/dpo/hf/config.json: no such file" in line for line in others)
    assert last.endswith("such as its base model: actor.model=BASE")
    assert plan("actor.model=small")["world_size"] == 1


def test_an_engine_cut_like_the_actor_is_no_second_reason(errors) -> None:
    assert [line.partition(" = ")[0] for line in errors("actor.tensor_parallel_size=4")] == [
        "actor.tensor_parallel_size"
    ]


def test_a_world_of_no_ranks_is_refused() -> None:
    with pytest.raises(SystemExit) as raised:
        main(["config.yaml", "--world-size", "0"])
    assert raised.value.code == 2


# ------------------------------------------------------------------------------------------------ as a command


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "hybridflow.plan", *arguments]
    return subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_the_tables_name_everything_and_fit_the_page() -> None:
    done = command("configs/qwen2_72b_64gpus.yaml", "--all")
    assert (done.returncode, done.stderr) == (0, "")
    assert "world size 64 (the smallest that its layouts go up in)" in done.stdout
    for text in (
        "tp 8 sp x pp 4 x dp 2",
        "8 of tp 8 x pp 1",
        "lower bound",
        "HybridFlow's formula",
        "DeepSpeed-Chat's",
    ):
        assert text in done.stdout
    *table, verdict = done.stdout.splitlines()
    assert table.pop(1) == verdict and verdict.endswith("or device_profile in the config.")
    assert max(map(len, table)) <= 112 and len(table) < 80


@pytest.mark.parametrize("name", ["llama3_8b_8gpus", "qwen3_8b_lora_1gpu", "qwen3_235b_a22b_64gpus"])
def test_a_plan_has_25_lines_with_the_verdict_first_and_last(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main([f"configs/{name}.yaml", "--memory-gib", "80"]) in (0, 3)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 25 and lines[1] == lines[-1] and lines[-1].startswith(("Fits: ", "Does not fit: "))
    assert sum(line.startswith("Weight sync: ") for line in lines) == 1
    assert sum(line.startswith("Checkpoint: ") for line in lines) == 1
    assert "formula" not in "".join(lines) and "; 0 GiB are left" not in lines[-1]


@pytest.mark.thorough
def test_72_billion_parameters_on_1024_ranks() -> None:
    arguments = ("--world-size", "1024", "--json", "actor.pipeline_parallel_size=8", "actor.data_parallel_size=16")
    done = command("configs/qwen2_72b_64gpus.yaml", *arguments)
    assert done.returncode == 0, done.stderr
    reshard = json.loads(done.stdout)["reshard"]
    assert reshard["received_bytes"] == reshard["lower_bound_bytes"]
    assert reshard["sent_bytes"]["total"] == reshard["received_bytes"]["total"]


@pytest.mark.thorough
def test_the_command_starts_no_engine_and_no_process_group() -> None:
    code = (
        "import sys; from hybridflow.plan import main; status = main(['configs/llama3_8b_8gpus.yaml', '--json']);"
        "import torch.distributed as dist; assert not dist.is_initialized();"
        "loaded = {'vllm', 'megatron', 'transformers'} & set(sys.modules); assert not loaded, loaded; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_status_of_the_command_is_1_where_nothing_fits() -> None:
    done = command("configs/llama3_8b_8gpus.yaml", "--world-size", "7")
    assert done.returncode == 1
    assert done.stderr.startswith("hybridflow.plan: error: actor: tensor_parallel_size")


def test_memory_is_that_of_the_most_samples_of_any_bucket(plan) -> None:
    """A prompt of any length may turn up in all of a batch."""
    bucket = "sampling.by_prompt_length=[{up_to: 2, samples_per_prompt: 3, max_response_length: 2}]"
    one_step = "algorithm.update.mini_batch_size=null"
    with_buckets, plain, most = (
        plan(one_step, *keys)["memory"] for keys in ([bucket], [], ["sampling.samples_per_prompt=3"])
    )
    assert with_buckets == most != plain
