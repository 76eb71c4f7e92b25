"""Whole runs with environments of many turns: real engines and worker processes, beside HuggingFace."""

import csv
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridflow.batch import PerToken, RolloutBatch
from hybridflow.checkpoint.state import load_state
from hybridflow.cli.samples import main
from hybridflow.recording.iteration import batch_metrics, turns_of_rows
from hybridflow.recording.marked_turns import OPENS
from hybridflow.reporting.runs import Samples
from hybridflow.reporting.shown_samples import shown_samples
from tests.environments.holes_worker import CASES as HOLES
from tests.environments.rollouts_worker import CASES
from tests.environments.tiny_chat import CALLS, END, STOPS, make_chat_inputs, make_tokenizer, run_config
from tests.launch import run_ranks

pytestmark = pytest.mark.distributed

ON_TWO = ("talk at tp 2", "talk at pp 2", "talk at dp 2")
LATER = ("later at tp 2", "later at dp 2")
END_ID = make_tokenizer().convert_tokens_to_ids(END)
FIELDS = {"input_ids", "lengths", "prompt_lengths", "prompt_indices", "truncated", "response_mask"}
FIELDS |= {"rollout_log_probs", "environment_rewards"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = make_chat_inputs(tmp_path_factory.mktemp("environments"))
    config = run_config(root, max_response_length=96)
    (root / "config.yaml").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="module")
def told(root: Path, cases: set[str]) -> dict[str, str]:
    """What went wrong, by case; nothing where nothing did."""
    names = [name for name in CASES if name in cases]
    run_ranks(1, "tests.environments.rollouts_worker", root / "config.yaml", root / "told.json", *names)
    return json.loads((root / "told.json").read_text())


@pytest.fixture(scope="module")
def on_two(root: Path) -> dict[str, RolloutBatch]:
    """The first rollouts of two ranks with an environment that answers at any time: with one engine, and with two."""
    run_ranks(2, "tests.environments.rollouts_worker", root / "config.yaml", root / "two.json", *ON_TWO, *LATER)
    found = json.loads((root / "two.json").read_text())
    assert {name: found[name] for name in ON_TWO} == dict.fromkeys(ON_TWO, "")
    return {name: rollout(root, name) for name in ON_TWO}


@dataclass(frozen=True)
class WithReference(RolloutBatch):
    log_probs: PerToken
    ref_log_probs: PerToken


def tensors(root: Path, name: str, iteration: int = 1) -> dict[str, Tensor]:
    directory = root / "runs" / name.replace(" ", "_")
    return load_file(directory / "batches" / f"iteration_{iteration:06d}.safetensors")


def rollout(root: Path, name: str, iteration: int = 1) -> RolloutBatch:
    return RolloutBatch(**{key: x for key, x in tensors(root, name, iteration).items() if key in FIELDS})


def metrics(root: Path, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader((root / "runs" / name.replace(" ", "_") / "metrics.csv").open()))


def turns(batch: RolloutBatch, row: int) -> list[tuple[bool, list[int]]]:
    """What follows the prompt: (whether the policy wrote it, its tokens), in turn."""
    start = int(batch.lengths[:row].sum() + batch.prompt_lengths[row])
    end = int(batch.lengths[: row + 1].sum())
    both = zip(batch.response_mask[start:end].tolist(), batch.input_ids[start:end].tolist(), strict=True)
    return [(by, [token for _, token in some]) for by, some in itertools.groupby(both, key=lambda one: one[0])]


@pytest.mark.cases("talk")
def test_a_rollout_of_many_turns_is_trained_on(root: Path, told: dict[str, str]) -> None:
    assert told["talk"] == ""
    rows = metrics(root, "talk")
    assert len(rows) == 2 and all(float(row["actor/grad_norm"]) > 0 for row in rows)
    assert all(float(row["environment/turns_mean"]) > 2 for row in rows)
    assert all(float(row["environment/cached_prefix_fraction"]) > 0 for row in rows)


@pytest.mark.cases("talk")
def test_log_probs_of_all_turns_are_one_pass_of_huggingface(root: Path, told: dict[str, str]) -> None:
    batch, model = rollout(root, "talk"), AutoModelForCausalLM.from_pretrained(root / "policy")
    expected = []
    for ids in batch.input_ids.split(batch.lengths.tolist()):
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0].log_softmax(-1)
        expected.append(torch.cat([torch.zeros(1), log_probs[:-1].gather(1, ids[1:, None]).flatten()]))
    difference = (torch.cat(expected) - batch.rollout_log_probs)[batch.response_mask].abs()
    assert batch.response_mask.sum() > 200 and difference.max() < 1e-4
    assert (batch.rollout_log_probs[~batch.response_mask] == 0).all()


@pytest.mark.cases("talk")
def test_what_is_written_between_turns_is_the_templates_own(root: Path, told: dict[str, str]) -> None:
    """Results of tools, errors that the model is told, and the environment's next message."""
    batch, tokenizer = rollout(root, "talk"), AutoTokenizer.from_pretrained(root / "policy")
    num_calls = 0
    for row in range(len(batch)):
        parts = turns(batch, row)
        assert [by for by, _ in parts] == [i % 2 == 0 for i in range(len(parts))] and len(parts) % 2
        for (_, said), (_, written) in zip(parts[::2], parts[1::2], strict=False):
            text, answer = tokenizer.decode(said), tokenizer.decode(written)
            ends, cut = said[-1] in (2, END_ID), len(said) == 16 and said[-1] not in (2, END_ID, *STOPS)
            assert answer.startswith("" if ends else END) and answer.endswith(f"{END}<|assistant|>")
            calls = [call for call in CALLS if call in text and not cut]
            kind = "tool" if calls else "user"
            assert answer.removeprefix("" if ends else END).startswith(f"<|{kind}|>")
            num_calls += len(calls)
            if calls == [CALLS[0]] and text.count("<tool_call>") == 1:
                assert answer == f"<|tool|>3{END}<|assistant|>"
            if calls == [CALLS[2]] and text.count("<tool_call>") == 1:
                assert answer == f"<|tool|>error: <unk>alue<unk>rror: not 3{END}<|assistant|>"
    assert 2 <= num_calls <= float(metrics(root, "talk")[0]["environment/tool_calls"])


@pytest.mark.thorough
@pytest.mark.cases("talk")
@pytest.mark.parametrize("case", ON_TWO)
def test_two_ranks_sample_what_one_does_whenever_tools_answer(
    case: str, on_two: dict[str, RolloutBatch], root: Path, told: object
) -> None:
    """Parts of layers, stages, and replicas of whole engines."""
    one, two = rollout(root, "talk"), on_two[case]
    for name in ("input_ids", "lengths", "response_mask", "environment_rewards", "truncated"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    assert (one.rollout_log_probs - two.rollout_log_probs).abs().max() < 1e-4
    for name in ("environment/turns_mean", "environment/tool_calls"):
        assert metrics(root, case)[0][name] == metrics(root, "talk")[0][name], name


@pytest.mark.cases("talk", "talk again")
@pytest.mark.thorough
def test_the_same_seed_gives_the_same_run(root: Path, told: dict[str, str]) -> None:
    """Tokens and all that follows from them. What the prefix cache has depends on when answers come: log-probs that are
    computed behind it differ in the last digits."""
    first, again = tensors(root, "talk", 2), tensors(root, "talk again", 2)
    for name in FIELDS - {"rollout_log_probs"}:
        assert torch.equal(first[name], again[name]), name
    assert torch.allclose(first["rollout_log_probs"], again["rollout_log_probs"], atol=1e-5)


@pytest.mark.cases("never done")
def test_no_turn_repeats_the_draws_of_another(root: Path, told: dict[str, str]) -> None:
    """A turn has a seed of its own: a random model would else draw nearly the same again."""
    batch = rollout(root, "never done")
    for row in range(len(batch)):
        said = [tuple(ids) for by, ids in turns(batch, row) if by]
        assert len(set(said)) == len(said) == 3


@pytest.mark.cases("never done", "no tokens left")
def test_turns_and_tokens_have_limits(root: Path, told: dict[str, str]) -> None:
    few, long = rollout(root, "never done"), rollout(root, "no tokens left")
    assert turns_of_rows(few).tolist() == [3] * 16
    behind = long.lengths - long.prompt_lengths
    assert (turns_of_rows(long) > 3).all() and behind.max() <= 96 and behind.min() > 96 - 16
    for batch in (few, long):
        assert batch.truncated.all() and (batch.environment_rewards == 0).all()
        assert all(len(ids) <= 8 for row in range(16) for by, ids in turns(batch, row) if by)


@pytest.mark.cases("fragile")
def test_rows_whose_environment_fails_are_masked_and_stay_in_their_group(root: Path, told: dict[str, str]) -> None:
    """The first questions are 0 to 3: the last three raise, hang and die; each row has a process of its own."""
    assert told["fragile"] == ""
    batch = rollout(root, "fragile")
    assert batch.failed.tolist() == [False] * 4 + [True] * 12
    assert batch.prompt_indices.bincount().tolist() == [4] * 4
    mask = batch.response_mask.split(batch.lengths.tolist())
    assert [bool(its.any()) for its in mask] == [not failed for failed in batch.failed.tolist()]
    advantages = tensors(root, "fragile")["advantages"]
    assert (advantages[~batch.response_mask] == 0).all() and advantages.isfinite().all()
    assert float(metrics(root, "fragile")[0]["environment/failed_rows"]) == 12


@pytest.mark.cases("fragile ends")
@pytest.mark.thorough
def test_a_failed_row_may_end_the_run(told: dict[str, str]) -> None:
    found = told["fragile ends"]
    assert "data.environment.class = tests.environments.classes_of_users:Fragile: row " in found
    assert "on_error: fail_row" in found


@pytest.mark.thorough
@pytest.mark.parametrize("name", LATER)
def test_a_failure_of_one_replica_saves_the_iteration_before(name: str, root: Path, on_two: object) -> None:
    found, steps = json.loads((root / "two.json").read_text())[name], root / "runs" / name.replace(" ", "_")
    assert "the run is saved after iteration 1" in found and "AssertionError: on purpose" in found
    assert load_state(steps / "checkpoints" / "step_000001").state.iteration == 1


@pytest.mark.cases("row time")
@pytest.mark.thorough
def test_a_row_has_a_time_limit_and_none_left_ends_the_run(told: dict[str, str]) -> None:
    assert "all 16 rows" in told["row time"] and "data.environment" in told["row time"]


@pytest.mark.cases("rollout time")
@pytest.mark.thorough
def test_a_rollout_goes_on_without_its_stragglers(root: Path, told: dict[str, str]) -> None:
    assert told["rollout time"] == ""
    batch = rollout(root, "rollout time")
    assert batch.failed.tolist() == [False] * 8 + [True] * 8
    assert float(metrics(root, "rollout time")[0]["time/generate_seconds"]) < 30


@pytest.mark.cases("parts")
def test_parts_of_a_reward_have_weights(root: Path, told: dict[str, str]) -> None:
    found, row = tensors(root, "parts"), metrics(root, "parts")[0]
    rewards = found["environment_rewards"]
    assert (rewards[:, 0] == 1).all() and torch.allclose(found["raw_scores"], 0.5 * rewards[:, 0] + rewards[:, 1])
    assert float(row["reward/environment/short"]) == pytest.approx(float(rewards[:, 1].mean()))


@pytest.mark.cases("ppo")
def test_ppo_learns_over_gaps(root: Path, told: dict[str, str]) -> None:
    assert told["ppo"] == ""
    found = tensors(root, "ppo")
    assert (found["rewards"][~found["response_mask"]] == 0).all()
    assert (found["advantages"][~found["response_mask"]] == 0).all()


@pytest.mark.cases("reinforce")
@pytest.mark.thorough
def test_reinforce_learns_over_gaps(root: Path, told: dict[str, str]) -> None:
    """Rewards to go pass over what the environment wrote: with gamma 1 they are the same for all tokens of a row."""
    assert told["reinforce"] == ""
    found = tensors(root, "reinforce")
    mask, lengths = found["response_mask"], found["lengths"].tolist()
    assert (found["advantages"][~mask] == 0).all() and float(metrics(root, "reinforce")[0]["actor/grad_norm"]) > 0
    for own, there in zip(found["advantages"].split(lengths), mask.split(lengths), strict=True):
        assert torch.allclose(own[there], own[there][0].expand(int(there.sum())))
    scores = found["raw_scores"].repeat_interleave(torch.tensor([int(x.sum()) for x in mask.split(lengths)]))
    expected = (scores - scores.mean()) / scores.std()
    assert torch.allclose(found["advantages"][mask], expected, atol=1e-3)


@pytest.fixture(scope="module")
def steps_with_holes(root: Path, told: dict[str, str]) -> dict[str, dict[str, Tensor]]:
    out = root / "holes.pt"
    run_ranks(1, "tests.environments.holes_worker", root / "config.yaml", root / "runs" / "talk", out, *HOLES)
    return torch.load(out)


@pytest.mark.thorough
@pytest.mark.cases("talk")
@pytest.mark.parametrize("case", HOLES)
def test_a_training_step_reads_nothing_of_what_stands_in_gaps(
    case: str, steps_with_holes: dict[str, dict[str, Tensor]]
) -> None:
    """With NaN in the log-probs and values of what the policy has not written, weights and metrics are the same."""
    whole, holes = (steps_with_holes[f"{case} {kind}"] for kind in ("whole", "holes"))
    assert whole.keys() == holes.keys() and any(name.startswith("weight") for name in whole)
    count = "number of tensors with holes"
    assert whole.pop(count) == 0 and holes.pop(count) >= 3  # the engine's, the policy's, the reference's
    for name, x in whole.items():
        assert torch.equal(x, holes[name]), name
        assert not x.is_floating_point() or not x.isnan().any(), name


@pytest.mark.cases("dynamic")
@pytest.mark.thorough
def test_dynamic_sampling_keeps_rewards(root: Path, told: dict[str, str]) -> None:
    assert told["dynamic"] == ""
    found = tensors(root, "dynamic", 2)
    assert torch.allclose(found["raw_scores"], found["environment_rewards"][:, 0])


@pytest.mark.cases("evaluated")
def test_evaluation_asks_the_environment(root: Path, told: dict[str, str]) -> None:
    assert told["evaluated"] == ""
    row = metrics(root, "evaluated")[-1]
    assert 0 <= float(row["eval/accuracy"]) <= 1 and float(row["eval/score_mean"]) > 0
    assert float(row["eval/failed_rows"]) == 0


@pytest.mark.cases("talk")
def test_samples_and_the_report_mark_what_the_environment_wrote(
    root: Path, told: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = root / "runs" / "talk"
    assert main([str(run)]) == 0
    assert OPENS in capsys.readouterr().out
    [sample] = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()][-1:]
    assert [turn["by"] for turn in sample["turns"]][:3] == ["model", "environment", "model"]
    assert "".join(turn["text"] for turn in sample["turns"]) == sample["response"]
    shown = shown_samples(Samples({1: [sample]}, 1), {})
    assert OPENS in shown["iterations"][0]["rows"][0]["response"]["text"]


@pytest.mark.cases("wrong parser")
@pytest.mark.thorough
def test_an_unknown_parser_is_refused(told: dict[str, str]) -> None:
    assert told["wrong parser"].startswith("ConfigError: data.environment.tool_parser = nobody's: vLLM has no such")


@pytest.mark.cases("talk")
def test_no_number_reads_what_stands_in_gaps(root: Path, told: dict[str, str]) -> None:
    """With NaN there, the metrics of the batch are the same; losses and estimates have tests of their own."""
    batch = rollout(root, "talk")
    log_probs = batch.rollout_log_probs + 0.1
    nowhere = (x.masked_fill(~batch.response_mask, float("nan")) for x in (batch.rollout_log_probs, log_probs))
    fields = {"rollout_log_probs": batch.rollout_log_probs, "log_probs": log_probs, "ref_log_probs": log_probs - 0.2}
    holes = dict(zip(fields, (*nowhere, fields["ref_log_probs"]), strict=True))
    found, expected = (batch_metrics(WithReference(**{**batch.tensors(), **some})) for some in (holes, fields))
    assert expected["rollout/gen_kl"] > 0 and expected["kl/sequence_mean"] != 0
    assert {name: float(x) for name, x in found.items()} == {name: float(x) for name, x in expected.items()}
