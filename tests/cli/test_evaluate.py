"""What `hybridflow eval` takes from a run, a model and the command line, what it refuses, and an evaluation."""

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from hybridflow.architecture.spec import read_spec
from hybridflow.checkpoint.store import begin, publish
from hybridflow.cli.evaluate import EvaluatedModel, _config, evaluated_model, named_set
from hybridflow.config import ExperimentConfig, read_tree
from hybridflow.config.auto import with_neutral
from hybridflow.config.evaluation import bare_tree, evaluation_tree, with_overrides
from hybridflow.errors import ConfigError, RunDirError
from hybridflow.placement.placed import of_role
from tests.distributed.tiny_experiment import make_inputs
from tests.launch import ROOT, of_no_rank
from tests.peft_models import save_as_run, write_by_hand
from tests.test_config import MINIMAL


def run_dir(root: Path, *iterations: int, hf: bool = False) -> Path:
    root.mkdir()
    (root / "config.yaml").write_text("name: x\n")
    for iteration in iterations:
        partial = begin(root / "checkpoints", iteration, ["actor"])
        (partial / "actor" / "config.json").write_text("{}")
        publish(root / "checkpoints", iteration, partial, {})
    if hf:
        (root / "hf").mkdir()
        (root / "hf" / "config.json").write_text("{}")
    return root


def test_a_run_is_its_last_checkpoint_or_the_one_that_is_named(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run", 3, 12, hf=True)
    last, named = evaluated_model(str(run), None), evaluated_model(str(run), 3)
    assert (last.model, last.name, last.run) == (f"{run}/checkpoints/step_000012/actor", "step_000012", run)
    assert (named.model, named.name) == (f"{run}/checkpoints/step_000003/actor", "step_000003")
    step = evaluated_model(str(run / "checkpoints" / "step_000003"), None)
    assert (step.model, step.name, step.run) == (named.model, named.name, run)
    hf = evaluated_model(str(run / "hf"), None)
    assert (hf.model, hf.name, hf.run) == (f"{run}/hf", "hf", run)
    assert evaluated_model(str(run_dir(tmp_path / "short", hf=True)), None).model == f"{tmp_path}/short/hf"


def test_a_model_is_a_directory_or_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridflow.cli.evaluate.fetched", lambda model, key: model)
    model = tmp_path / "hf"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert evaluated_model(str(model), None).run is None, "beside no config of a run"
    hub = evaluated_model("some-body/model-7B@v1", None)
    assert (hub.model, hub.name, hub.run) == ("some-body/model-7B@v1", "some-body--model-7B--v1", None)


def test_adapters_are_evaluated_on_their_base_model(tmp_path: Path) -> None:
    """A directory of PEFT, the one of a run, and a checkpoint that holds adapters alone."""
    base = make_inputs(tmp_path / "inputs") / "policy"
    modules = {f"model.layers.{layer}.self_attn.o_proj": (256, 256) for layer in range(2)}
    alone = write_by_hand(base, tmp_path / "mine", modules)
    found = evaluated_model(str(alone), None)
    assert found == EvaluatedModel(str(base), "mine", None, adapter=str(alone))
    assert evaluated_model(str(alone), None, base="some-body/model-7B").model == "some-body/model-7B"
    run = run_dir(tmp_path / "run", hf=True)
    partial = begin(run / "checkpoints", 3, ["actor"])
    shutil.rmtree(partial / "actor")
    save_as_run(alone, base, partial / "actor")
    publish(run / "checkpoints", 3, partial, {})
    actor = run / "checkpoints" / "step_000003" / "actor"
    assert evaluated_model(str(run), 3) == EvaluatedModel(str(base), "step_000003", run, adapter=str(actor))
    assert evaluated_model(str(actor), None) == evaluated_model(str(run), 3), "a checkpoint is named by its actor too"
    shutil.copytree(alone, run / "adapter")
    assert evaluated_model(f"{run}/adapter", None).run == run
    with pytest.raises(ConfigError, match=r"--base x: .*hf holds no adapters of a base model"):
        evaluated_model(f"{run}/hf", None, base="x")
    with pytest.raises(ConfigError, match=r"--base = nowhere: no such directory here"):
        evaluated_model(f"{run}/adapter", None, base="nowhere")


def test_adapters_of_a_run_on_fixed_data_have_its_positions(tmp_path: Path) -> None:
    """Which the base model's config.json lacks; such a run's config says nothing else of an evaluation."""
    base, run = make_inputs(tmp_path / "inputs") / "policy", run_dir(tmp_path / "run")
    overrides = {"max_position_embeddings": 256}
    (run / "config.yaml").write_text(json.dumps({"name": "x", "actor": {"hf_overrides": overrides}}))
    (tmp_path / "x.jsonl").write_text('{"prompt": "1+2="}\n')
    options = Namespace(model=str(run), data=[str(tmp_path / "x.jsonl")], reward="a:b", max_tokens=16)
    for adapter, expected in ((str(run / "adapter"), overrides), (None, None)):
        _, tree = _config(EvaluatedModel(str(base), "x", run, adapter=adapter), options, [], [])
        assert tree["actor"].get("hf_overrides") == expected


def test_adapters_have_the_positions_that_they_were_trained_with(tmp_path: Path) -> None:
    """Whatever a config of another model says, and without any config; the command line comes last."""
    base = make_inputs(tmp_path / "inputs") / "policy"
    modules = {f"model.layers.{layer}.self_attn.o_proj": (256, 256) for layer in range(2)}
    adapter = write_by_hand(base, tmp_path / "adapter", modules)
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}
    recorded = {"max_position_embeddings": 1024, "rope_scaling": yarn}
    (adapter / "base_weights.json").write_text(json.dumps({"hf_overrides": recorded}))
    other, key = tmp_path / "other.yaml", {"hf_overrides": {"max_position_embeddings": 8192}}
    (tmp_path / "x.jsonl").write_text('{"prompt": "1+2="}\n')
    options = Namespace(model=str(adapter), data=[str(tmp_path / "x.jsonl")], reward="a:b", max_tokens=900)
    found, sets = evaluated_model(str(adapter), None), {"x": str(tmp_path / "x.jsonl")}
    for actor, configs, prompt in (({}, [], 1024 - 900), ({}, [str(other)], 100), (key, [str(other)], 100)):
        other.write_text(json.dumps({**MINIMAL, "actor": MINIMAL["actor"] | actor}))
        _, tree = _config(found, options, configs, [])
        config = made(tree, model=found.model, adapter=found.adapter, sets=sets)
        spec = of_role(config, "actor", read_spec(base))
        assert (spec.max_positions, spec.rope) == (1024, read_spec(base, overrides=recorded).rope)
        assert spec.rope != read_spec(base).rope and spec.lora is not None
        assert config.data.max_prompt_length == prompt, "without a config what a response leaves of the positions"
    _, tree = _config(found, options, [str(other)], ["actor.hf_overrides.max_position_embeddings=512"])
    config = made(tree, model=found.model, adapter=found.adapter, sets=sets)
    with pytest.raises(ConfigError, match=r"^actor.hf_overrides = {max_position_embeddings: 512, .* were trained with"):
        of_role(config, "actor", read_spec(base))


def test_a_whole_model_has_the_overrides_of_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    key = {"hf_overrides": {"max_position_embeddings": 256}}
    tree = {**MINIMAL, "actor": MINIMAL["actor"] | key}
    for model, kept in (("models/policy", key), (f"{tmp_path}/models/../models/policy", key), ("models/value", {})):
        found = with_overrides(tree, model, {}, adapted=False)
        assert found == {**tree, "actor": MINIMAL["actor"] | kept}
        made(found, sets={"x": "x.jsonl"})
    assert with_overrides(tree, "models/value", {}, adapted=True) == tree
    (tmp_path / "a.yaml").write_text(json.dumps(tree))
    options, given = Namespace(model="models/value", data=[]), "actor.hf_overrides.max_position_embeddings=512"
    _, found = _config(EvaluatedModel("models/value", "x", None), options, ["a.yaml"], [given])
    assert found["actor"]["hf_overrides"] == {"max_position_embeddings": 512}, "the command line means this model"


def test_an_evaluation_has_the_adapters_that_are_named_and_no_others() -> None:
    """A run's own lie in its merged model already."""
    tree = {**MINIMAL, "actor": {**MINIMAL["actor"], "lora": {"rank": 8}}}
    assert made(tree, sets={"x": "x.jsonl"}).actor.lora is None
    lora = made(tree, sets={"x": "x.jsonl"}, adapter="run/adapter").actor.lora
    assert lora is not None and (lora.adapter_path, lora.rank) == ("run/adapter", None)
    assert "lora" not in evaluation_tree(MINIMAL, model="m", name="n", output_dir="o", sets={"x": "x.jsonl"})["actor"]


def test_what_cannot_be_evaluated_is_told(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run", 3, 12)
    with pytest.raises(
        RunDirError, match=r"--checkpoint 7: .*run has no checkpoint after this iteration; there are 3, 12"
    ):
        evaluated_model(str(run), 7)
    with pytest.raises(RunDirError, match=r"has neither a checkpoint nor a trained model in hf/"):
        evaluated_model(str(run_dir(tmp_path / "empty")), None)
    with pytest.raises(RunDirError, match=r"nothing: no such run; .* has others"):
        evaluated_model(str(tmp_path / "nothing"), None)
    with pytest.raises(RunDirError, match=r"nothing: is neither a run's directory nor a model's"):
        evaluated_model(str(tmp_path / "no" / "where" / "nothing"), None)
    shutil.rmtree(run / "checkpoints" / "step_000012" / "actor")
    with pytest.raises(Exception, match=r"step_000012.*config.json"):
        evaluated_model(str(run), None)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(RunDirError, match=r"--checkpoint 3: .*model is no run"):
        evaluated_model(str(tmp_path / "model"), 3)


@pytest.mark.parametrize(
    ("given", "name", "files"),
    [
        ("rows/test.jsonl", "test", "rows/test.jsonl"),
        ("math=a=b.jsonl", "math", "a=b.jsonl"),
        ("a b.tar.gz", "a-b", "a b.tar.gz"),
        (
            "gsm8k={hub: openai/gsm8k, name: main, split: test}",
            "gsm8k",
            {"hub": "openai/gsm8k", "name": "main", "split": "test"},
        ),
    ],
)
def test_rows_are_named_or_called_by_their_file(given: str, name: str, files: Any) -> None:
    assert named_set(given) == (name, files)


def made(tree: dict[str, Any], **more: Any) -> ExperimentConfig:
    given = {"model": "m/hf", "name": "hf", "output_dir": "runs/x/eval", "sets": {}, "reward": "m:f", **more}
    return ExperimentConfig.from_tree(evaluation_tree(tree, **given), "the tree")


def test_the_config_has_the_actor_and_the_rewards_and_trains_nothing() -> None:
    data = {**MINIMAL["data"], "heldout": {"a": {"files": "a.jsonl", "interval": 5}, "b": {"files": "b.jsonl"}}}
    config = made({**MINIMAL, "data": data, "stop_when": {"metric": "eval/accuracy", "at_least": 1}})
    assert list(config.roles()) == ["actor", *(name for name in config.roles() if name.startswith("reward"))]
    assert (config.actor.model, str(config.run_dir)) == ("m/hf", "runs/x/eval/hf")
    assert config.reward is not None and config.critic is config.reference is config.stop_when is None
    assert config.data.train == "a.jsonl", "rows to train on need not be here"
    assert config.checkpoint.load == "none" and not config.checkpoint.saves
    assert [(name, each.samples, each.temperature) for name, each in config.data.heldout_sets.items()] == [
        ("a", 1, 0.0),
        ("b", 1, 0.0),
    ]


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_config_that_generates_can_be_evaluated(path: Path) -> None:
    tree = with_neutral(read_tree(path))
    if "sampling" not in tree:
        return
    config = made(tree, sets={"x": "x.jsonl"}, samples=4)
    assert list(config.data.heldout_sets) == ["x"] and "critic" not in config.roles()


def test_samples_and_temperatures_of_the_command_line() -> None:
    data = {**MINIMAL["data"], "heldout": {"a": {"files": "a.jsonl"}, "b": {"files": "b.jsonl", "temperature": 0.6}}}
    tree = {**MINIMAL, "data": data, "sampling": {**MINIMAL["sampling"], "temperature": 0.9}}

    def drawn(**more: Any) -> dict[str, tuple[int, float]]:
        sets = made(tree, **more).data.heldout_sets
        return {name: (each.samples, each.temperature) for name, each in sets.items()}

    assert drawn(samples=16) == {"a": (16, 0.9), "b": (16, 0.6)}
    assert drawn(samples=16, temperature=0.3) == {"a": (16, 0.3), "b": (16, 0.3)}
    assert drawn(samples=1) == {"a": (1, 0.0), "b": (1, 0.6)}
    alone = {**MINIMAL, "data": {**MINIMAL["data"], "heldout": "h.jsonl"}}
    assert list(made(alone).data.heldout_sets) == [""], "with the seeds of the run"
    assert list(made(alone, samples=2).data.heldout_sets) == ["heldout"]
    assert list(made(alone, sets={"x": "x.jsonl"}).data.heldout_sets) == ["x"]
    with pytest.raises(ConfigError, match=r"data.heldout = null: give --data FILE"):
        made(MINIMAL)


def test_the_options_length_holds_for_prompts_of_all_lengths() -> None:
    buckets = [{"up_to": 20, "max_response_length": 10, "temperature": 0.5}, {"up_to": 40, "samples_per_prompt": 2}]
    tree = {**MINIMAL, "sampling": {**MINIMAL["sampling"], "by_prompt_length": buckets}}
    for given, lengths in ((None, (10, 50, 50)), (30, (30, 30, 30)), (8, (8, 8, 8))):
        sampling = made(tree, sets={"x": "x.jsonl"}, max_tokens=given).sampling
        assert sampling.limits.values == lengths and sampling.samples.values == (2, 2, 2)
        assert [section.temperature for section in sampling.sections()] == [0.5, 1.0, 1.0]


def test_a_model_alone_has_the_lengths_that_it_takes() -> None:
    given = {"chat_template": True, "chat_template_kwargs": {"enable_thinking": False}}
    config = made(bare_tree(max_positions=40, max_tokens=32, **given), sets={"x": "x.jsonl"}, threshold=0.5)
    assert (config.data.max_prompt_length, config.sampling.max_response_length) == (8, 32)
    assert config.data.chat_template and config.data.chat_template_kwargs == {"enable_thinking": False}
    assert config.reward is None and list(config.roles()) == ["actor"] and config.metrics.eval_threshold == 0.5
    with pytest.raises(ConfigError, match=r"--max-tokens 40: leaves no room for a prompt; the model takes 40 tokens"):
        bare_tree(max_positions=40, max_tokens=40, **given)


def evaluate(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hybridflow", "eval", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=of_no_rank(), capture_output=True, text=True, timeout=600)


def test_errors_are_one_line(tmp_path: Path) -> None:
    model = make_inputs(tmp_path / "inputs") / "policy"
    done = evaluate(model)
    told = f"hybridflow eval: error: {model}: is of no run: give a CONFIG, or --data FILE and --reward FUNCTION\n"
    assert (done.returncode, done.stderr) == (1, told)
    done = evaluate(model, "--data", "x.jsonl")
    told = "hybridflow eval: error: --data without a CONFIG needs --reward FUNCTION, such as "
    assert (done.returncode, done.stderr) == (1, f"{told}hybridflow.rewards:numeric_match\n")


@pytest.mark.slow
def test_what_is_refused_leaves_an_earlier_evaluation_alone(tmp_path: Path) -> None:
    """Rows that are not there, and the place of another model's results."""
    model, out = make_inputs(tmp_path / "inputs") / "policy", tmp_path / "out"
    given = ("--reward", "hybridflow.rewards:exact_match", "--max-tokens", 8, "--output", out)
    done = evaluate(model, "--data", "my set=x.jsonl", *given)
    assert done.returncode == 1 and "my set=x.jsonl: no such file" in done.stderr and not out.exists()
    out.mkdir()
    (out / "config.yaml").write_text("actor: {model: another}\n")
    done = evaluate(model, "--data", tmp_path / "inputs" / "heldout.jsonl", *given)
    told = f"hybridflow eval: error: {out}: has the evaluation of another model, another: give --output DIR\n"
    assert (done.returncode, done.stderr) == (1, told)
    assert (out / "config.yaml").read_text() == "actor: {model: another}\n"


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_model_is_evaluated_on_two_ranks(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path / "inputs")
    done = evaluate(
        *(inputs / "policy", "--data", f"sums={inputs / 'heldout.jsonl'}", "--data", inputs / "train.jsonl", "-k", 4),
        *("--reward", "hybridflow.rewards:exact_match", "--max-tokens", 8, "--nproc", 2, "--output", tmp_path / "out"),
        *("actor.dtype=float32", "actor.tensor_parallel_size=2", "rollout.kv_cache_gib=0.0625"),
    )
    assert done.returncode == 0, done.stderr
    assert "sums: generating 5 prompts x 4 responses, at temperature 1" in done.stdout
    assert "right is a score of " in done.stdout and " of at least metrics.eval_threshold = 1" in done.stdout
    assert "train: pass@1 0.0%  pass@2 0.0%  pass@4 0.0%" in done.stdout
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {name: (own["prompts"], own["samples"]) for name, own in results["sets"].items()} == {
        "sums": (5, 4),
        "train": (16, 4),
    }
    assert results["right"] == "a score of hybridflow.rewards:exact_match of at least 1"
    assert results["majority"] == "by the text of the response"
