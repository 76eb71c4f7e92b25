"""Whole runs with agents that speak to a URL: OpenAI's client as it is, real engines, beside HuggingFace."""

import csv
import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridflow.batch import RolloutBatch
from hybridflow.recording.iteration import turns_of_rows
from tests.agents.agents_of_users import ADD
from tests.agents.runs_worker import ADDRESS, CASES, WRONG
from tests.environments.tiny_chat import CALLS, END, STOPS, make_chat_inputs, make_tokenizer, run_config
from tests.launch import run_ranks

pytestmark = pytest.mark.distributed

ON_TWO = [name for name in CASES if name.endswith("at tp 2")]
END_ID = make_tokenizer().convert_tokens_to_ids(END)
FIELDS = {"input_ids", "lengths", "prompt_lengths", "prompt_indices", "truncated", "response_mask"}
FIELDS |= {"rollout_log_probs", "environment_rewards", "branch_starts"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = make_chat_inputs(tmp_path_factory.mktemp("agents"))
    rows = [json.loads(line) for line in (root / "train.jsonl").read_text().splitlines()]
    prompts = [{"prompt": [{"role": "user", "content": row["question"]}], "tools": [ADD], **row} for row in rows]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (root / "word.txt").write_text("secret\n")
    config = run_config(root, max_response_length=160)
    (root / "config.yaml").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="module")
def told(root: Path, cases: set[str]) -> dict[str, str]:
    """What went wrong, by case; nothing where nothing did."""
    names = [name for name in CASES if name in cases and name not in ON_TWO]
    run_ranks(1, "tests.agents.runs_worker", root / "config.yaml", root / "told.json", *names)
    return json.loads((root / "told.json").read_text())


@pytest.fixture(scope="module")
def on_two(root: Path) -> None:
    """Runs of two ranks that share an engine."""
    run_ranks(2, "tests.agents.runs_worker", root / "config.yaml", root / "two.json", *ON_TWO)
    assert json.loads((root / "two.json").read_text()) == dict.fromkeys(ON_TWO, "")


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


def furthest_log_prob(root: Path, batch: RolloutBatch) -> float:
    """From one pass of HuggingFace over each sequence, by the weights that the first rollout has."""
    model, expected = AutoModelForCausalLM.from_pretrained(root / "policy"), []
    for ids in batch.input_ids.split(batch.branch_lengths.tolist()):
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0].log_softmax(-1)
        expected.append(torch.cat([torch.zeros(1), log_probs[:-1].gather(1, ids[1:, None]).flatten()]))
    assert (batch.rollout_log_probs[~batch.response_mask] == 0).all()
    return float((torch.cat(expected) - batch.rollout_log_probs)[batch.response_mask].abs().max())


@pytest.mark.cases("calculator")
def test_an_unchanged_client_with_a_tool_is_trained_on(root: Path, told: dict[str, str]) -> None:
    assert told["calculator"] == ""
    rows = metrics(root, "calculator")
    assert len(rows) == 2 and all(float(row["actor/grad_norm"]) > 0 for row in rows)
    for row in rows:
        assert float(row["environment/turns_mean"]) == 3 and float(row["environment/failed_rows"]) == 0
        assert float(row["environment/cached_prefix_fraction"]) > 0 and float(row["environment/tool_calls"]) > 0


@pytest.mark.cases("calculator")
def test_tokens_are_those_that_the_template_gives_the_whole_conversation(root: Path, told: dict[str, str]) -> None:
    """The first request, and between turns results of tools or the agent's next message."""
    batch, tokenizer = rollout(root, "calculator"), AutoTokenizer.from_pretrained(root / "policy")
    assert batch.response_mask.sum() > 200
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), batch.lengths.cumsum(0)[:-1]])
    num_calls = 0
    for row in range(len(batch)):
        parts = turns(batch, row)
        assert [by for by, _ in parts] == [True, False] * 2 + [True]
        prompt = batch.input_ids[starts[row] : starts[row] + batch.prompt_lengths[row]]
        question = f"{row // 4}+{row // 4}="
        assert tokenizer.decode(prompt) == f"<|system|>add {END}<|user|>{question}{END}<|assistant|>"
        for (_, said), (_, written) in zip(parts[::2], parts[1::2], strict=False):
            text, answer = tokenizer.decode(said), tokenizer.decode(written)
            ends, cut = said[-1] in (2, END_ID), len(said) == 16 and said[-1] not in (2, END_ID, *STOPS)
            assert answer.startswith("" if ends else END) and answer.endswith(f"{END}<|assistant|>")
            calls = [] if cut or CALLS[4] in text else [call for call in CALLS if call in text]
            written_by = "tool" if calls else "user"
            assert answer.removeprefix("" if ends else END).startswith(f"<|{written_by}|>")
            num_calls += len(calls)
            if calls == [CALLS[0]] and text.count("<tool_call>") == 1:
                assert answer.removeprefix("" if ends else END) == f"<|tool|>3{END}<|assistant|>"
    assert 1 <= num_calls <= float(metrics(root, "calculator")[0]["environment/tool_calls"])


@pytest.mark.cases("calculator", "streamed", "given prompt", "leaves")
def test_log_probs_of_all_turns_are_one_pass_of_huggingface(root: Path, told: dict[str, str]) -> None:
    for name in ("calculator", "streamed", "given prompt", "leaves"):
        assert furthest_log_prob(root, rollout(root, name)) < 1e-4, name


@pytest.mark.cases("calculator")
def test_rewards_are_what_the_agent_returns(root: Path, told: dict[str, str]) -> None:
    batch = rollout(root, "calculator")
    assert batch.environment_rewards.shape == (16, 1) and len(set(batch.environment_rewards.flatten().tolist())) > 2
    found = tensors(root, "calculator")
    assert torch.equal(found["raw_scores"], batch.environment_rewards[:, 0])
    assert (found["advantages"][~batch.response_mask] == 0).all()


@pytest.mark.thorough
@pytest.mark.cases("calculator", "calculator at tp 2")
def test_two_ranks_sample_what_one_does_whenever_agents_ask(root: Path, told: dict[str, str], on_two: None) -> None:
    one, two = rollout(root, "calculator"), rollout(root, "calculator at tp 2")
    for name in ("input_ids", "lengths", "response_mask", "environment_rewards", "truncated"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    assert (one.rollout_log_probs - two.rollout_log_probs).abs().max() < 1e-4


@pytest.mark.cases("calculator", "calculator again")
@pytest.mark.thorough
def test_the_same_seed_gives_the_same_run(root: Path, told: dict[str, str]) -> None:
    first, again = tensors(root, "calculator", 2), tensors(root, "calculator again", 2)
    for name in FIELDS - {"rollout_log_probs", "branch_starts"}:
        assert torch.equal(first[name], again[name]), name
    assert torch.allclose(first["rollout_log_probs"], again["rollout_log_probs"], atol=1e-5)


@pytest.mark.cases("streamed")
def test_a_stream_says_the_same_and_a_client_may_lower_the_limit(root: Path, told: dict[str, str]) -> None:
    """Its own max_tokens is 5; the parts of its reward have weights."""
    assert told["streamed"] == ""
    batch, found = rollout(root, "streamed"), tensors(root, "streamed")
    said = [[len(ids) for by, ids in turns(batch, row) if by] for row in range(16)]
    assert all(len(each) == 2 and max(each) <= 5 for each in said)
    tokens = torch.tensor([float(sum(each)) for each in said])
    assert torch.equal(batch.environment_rewards, torch.stack([tokens, torch.ones(16)], dim=1))
    assert torch.allclose(found["raw_scores"], 0.5 * tokens + 1)


@pytest.mark.cases("given prompt")
def test_the_data_files_prompt_may_be_the_agents(root: Path, told: dict[str, str]) -> None:
    assert told["given prompt"] == ""
    batch, tokenizer = rollout(root, "given prompt"), AutoTokenizer.from_pretrained(root / "policy")
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), batch.lengths.cumsum(0)[:-1]])
    for row in range(16):
        ids = batch.input_ids[starts[row] : starts[row] + batch.prompt_lengths[row]]
        expected = f"<|system|>add {END}<|user|>{row // 4}+{row // 4}={END}<|assistant|>"
        assert tokenizer.decode(ids) == expected and [by for by, _ in turns(batch, row)] == [True]


@pytest.mark.cases("fragile")
def test_rows_whose_agent_fails_are_masked_and_stay_in_their_group(root: Path, told: dict[str, str]) -> None:
    """The first questions are 0 to 3: the last three raise, hang and die; each row has a process of its own."""
    assert told["fragile"] == ""
    batch = rollout(root, "fragile")
    assert batch.failed.tolist() == [False] * 2 + [True] * 6
    assert batch.prompt_indices.bincount().tolist() == [2] * 4
    mask = batch.response_mask.split(batch.lengths.tolist())
    assert [bool(its.any()) for its in mask] == [not failed for failed in batch.failed.tolist()]
    assert float(metrics(root, "fragile")[0]["environment/failed_rows"]) == 6


@pytest.mark.cases("silent")
@pytest.mark.thorough
def test_a_row_without_a_request_counts_for_nothing(root: Path, told: dict[str, str]) -> None:
    assert told["silent"] == ""
    batch, found = rollout(root, "silent"), tensors(root, "silent")
    silent = torch.tensor([row // 4 % 2 == 1 for row in range(16)])
    assert torch.equal(batch.failed, silent) and (batch.lengths[silent] == 2).all()
    assert (batch.prompt_lengths[~silent] == 13).all()
    mask = batch.response_mask.split(batch.lengths.tolist())
    assert [bool(its.any()) for its in mask] == (~silent).tolist()
    assert found["advantages"].isfinite().all() and float(metrics(root, "silent")[0]["actor/grad_norm"]) > 0


@pytest.mark.cases("ppo")
@pytest.mark.thorough
def test_ppo_learns_over_gaps(root: Path, told: dict[str, str]) -> None:
    assert told["ppo"] == ""
    found = tensors(root, "ppo")
    assert (found["rewards"][~found["response_mask"]] == 0).all()
    assert (found["advantages"][~found["response_mask"]] == 0).all()


@pytest.mark.cases("dynamic")
@pytest.mark.thorough
def test_dynamic_sampling_keeps_rewards_and_prompts(root: Path, told: dict[str, str]) -> None:
    assert told["dynamic"] == ""
    found = tensors(root, "dynamic", 2)
    assert torch.allclose(found["raw_scores"], found["environment_rewards"][:, 0])
    assert (found["prompt_lengths"] > 1).all()


@pytest.mark.cases("calculator")
@pytest.mark.thorough
def test_a_replay_takes_prompts_and_turns_from_the_file(root: Path, told: dict[str, str]) -> None:
    config, how = root / "config.yaml", CASES["calculator"][0]
    more = ("name=replayed", "num_iterations=1", "checkpoint.load=none")
    run_ranks(1, "hybridflow.train", "--replay", root / "runs" / "calculator", config, how, *more)
    then, now = tensors(root, "calculator"), tensors(root, "replayed-replay")
    for name in ("input_ids", "prompt_lengths", "response_mask", "environment_rewards", "advantages"):
        assert torch.equal(then[name], now[name]), name


@pytest.mark.cases("calculator")
def test_samples_show_the_first_request_as_the_prompt(root: Path, told: dict[str, str]) -> None:
    lines = (root / "runs" / "calculator" / "samples.jsonl").read_text().splitlines()
    for sample in map(json.loads, lines):
        assert sample["prompt"] == f"<|system|>add {sample['columns']['question']}"
        assert [turn["by"] for turn in sample["turns"]] == ["model", "environment"] * 2 + ["model"]
    assert lines


@pytest.mark.cases("fragile ends")
@pytest.mark.thorough
def test_a_failed_row_may_end_the_run(told: dict[str, str]) -> None:
    found = told["fragile ends"]
    assert "data.environment.agent = tests.agents.agents_of_users:fragile: row " in found
    assert "on_error: fail_row" in found


@pytest.mark.thorough
@pytest.mark.cases(*(f"wrong {number}" for number in range(len(WRONG))))
@pytest.mark.parametrize(("number", "problem"), list(enumerate(WRONG.values())), ids=list(WRONG))
def test_what_an_agent_does_wrong_is_told(told: dict[str, str], number: int, problem: str) -> None:
    assert problem in told[f"wrong {number}"]


@pytest.mark.thorough
@pytest.mark.cases("leaves", "leaves at tp 2")
def test_a_client_that_goes_away_leaves_nothing(root: Path, told: dict[str, str], on_two: None) -> None:
    """Two turns are there of each row, whatever was under way when its client left."""
    for name in ("leaves", "leaves at tp 2"):
        batch = rollout(root, name)
        assert turns_of_rows(batch).tolist() == [2] * 16 and not batch.failed.any(), name
        for row in range(16):
            parts = turns(batch, row)
            assert [by for by, _ in parts] == [True, False, True] and int(batch.prompt_lengths[row]) == 7
    assert furthest_log_prob(root, rollout(root, "leaves at tp 2")) < 1e-4


@pytest.mark.cases("few turns", "few tokens")
def test_turns_and_tokens_have_limits(root: Path, told: dict[str, str]) -> None:
    """An agent that is refused for a limit and raises has the reward 0; one that returns has its own."""
    few, long = rollout(root, "few turns"), rollout(root, "few tokens")
    assert turns_of_rows(few).tolist() == [3] * 16 and (turns_of_rows(long) > 5).all()
    behind = long.lengths - long.prompt_lengths
    assert behind.max() <= 160 and behind.min() > 160 - 8 - 10
    for batch in (few, long):
        assert batch.truncated.all() and not batch.failed.any()
        assert batch.environment_rewards.flatten().tolist() == ([0.5] * 4 + [0.0] * 4) * 2


@pytest.mark.cases("late")
@pytest.mark.thorough
def test_an_agent_that_does_not_ask_is_late(told: dict[str, str]) -> None:
    assert "all 16 rows" in told["late"]


@pytest.mark.cases("evaluated")
@pytest.mark.thorough
def test_evaluation_runs_agents(root: Path, told: dict[str, str]) -> None:
    assert told["evaluated"] == ""
    row = metrics(root, "evaluated")[-1]
    assert float(row["eval/score_mean"]) > 0 and float(row["eval/failed_rows"]) == 0


@pytest.mark.cases("elsewhere")
@pytest.mark.thorough
@pytest.mark.skipif(ADDRESS is None, reason="this host has no address by which it would reach others")
def test_a_run_listens_at_another_interface(root: Path, told: dict[str, str]) -> None:
    """Each agent is refused three times without the word, finds nobody at 127.0.0.1, and is answered with it."""
    assert told["elsewhere"] == ""
    batch = rollout(root, "elsewhere")
    said = [[(by, float(len(ids))) for by, ids in turns(batch, row)] for row in range(16)]
    rewards = batch.environment_rewards.tolist()
    assert said == [[(True, tokens)] for tokens, _ in rewards] and {refused for _, refused in rewards} == {3.0}
    assert not batch.failed.any() and furthest_log_prob(root, batch) < 1e-4


@pytest.mark.cases("other prompt")
@pytest.mark.thorough
def test_a_first_request_that_is_not_the_rows_is_told(told: dict[str, str]) -> None:
    """The agent has the question of the file's prompt, and not its tool."""
    assert "the first request does not begin with the row's prompt" in told["other prompt"]
    assert "data.environment.prompt: column" in told["other prompt"]
