"""Runs whose rows have several sequences: sub-agents, a shortened history, a template that rewrites earlier turns."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridflow.batch import RolloutBatch
from tests.agents.runs_worker import named
from tests.agents.test_runs import FIELDS, furthest_log_prob, metrics, rollout, tensors
from tests.environments import rollouts_worker
from tests.environments.tiny_chat import END, TEMPLATE, make_chat_inputs, make_tokenizer, run_config
from tests.launch import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

SHOWN = "('- ' if message.role == 'assistant' and not loop.last else '') + message.content }}"
REWRITES = TEMPLATE.replace("message.content }}", SHOWN)
ONE = "num_iterations=1"
WHOLE_STEP = "algorithm={name: grpo, kl: {use: none}, update: {mini_batch_size: 16}, policy: {loss_mean: MEAN}}"
ONE_STEP = [WHOLE_STEP.replace("MEAN", "sequence_token_mean"), ONE]
SMALL = "actor.micro_batch_tokens=192"  # of a row more than that
SHORT = [ONE, "sampling={samples_per_prompt: 4, max_response_length: 24}"]  # which ends some turns
NUM_SEQUENCES = 4


def agent(name: str = "with_sub_agents", **more: Any) -> str:
    how = {"earlier_turns": "branch", "max_turn_tokens": 16, **more}
    return named(name, **how)


def talk(root: Path) -> list[str]:
    environment = {"class": f"{rollouts_worker.USERS}:Talk", "earlier_turns": "branch", "max_turn_tokens": 16}
    return [f"data.environment={json.dumps(environment)}", f"actor.model={root / 'rewriting'}", ONE]


def cases(root: Path) -> dict[str, list[str]]:
    return {
        "sub agents": [agent()],
        "again": [agent(arguments={"delay": 0.05})],
        "one step": [agent(), *ONE_STEP],
        "small": [agent(), *ONE_STEP, SMALL],
        "ppo": [
            agent(),
            rollouts_worker.PPO,
            f"critic={{model: {root / 'critic'}, dtype: float32, optimizer: {{lr: 0.001}}}}",
            ONE,
        ],
        "dynamic": [agent(), rollouts_worker.DYNAMIC],
        "together": [agent("together"), *SHORT],
        "together again": [agent("together", arguments={"delay": 0.05}), *SHORT],
        "rewriting": talk(root),
        "refused": [agent(earlier_turns="refuse", on_error="end_run"), ONE],
    }


ON_TWO = {
    "at tp 2": [agent(arguments={"delay": 0.05}), "actor.tensor_parallel_size=2", ONE],
    "together at tp 2": [agent("together", arguments={"delay": 0.05}), "actor.tensor_parallel_size=2", *SHORT],
    "at dp 2": [agent(), *ONE_STEP, "actor.tensor_parallel_size=1"],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = make_chat_inputs(tmp_path_factory.mktemp("branches"))
    (root / "config.yaml").write_text(json.dumps(run_config(root, max_response_length=160)))
    shutil.copytree(root / "policy", root / "rewriting")
    make_tokenizer(REWRITES).save_pretrained(root / "rewriting")
    return root


def run(root: Path, ranks: int, cases: dict[str, list[str]]) -> dict[str, str]:
    told, file = root / f"told_{ranks}.json", root / f"cases_{ranks}.json"
    file.write_text(json.dumps(cases))
    run_ranks(ranks, "tests.agents.verifiers_worker", root / "config.yaml", told, file)
    return json.loads(told.read_text())


@pytest.fixture(scope="module")
def told(root: Path) -> dict[str, str]:
    return run(root, 1, cases(root))


@pytest.fixture(scope="module")
def on_two(root: Path) -> None:
    assert run(root, 2, ON_TWO) == dict.fromkeys(ON_TWO, "")


def sequences(batch: RolloutBatch, row: int) -> list[list[int]]:
    """Tokens of each of a row."""
    own = (batch.rows_of_branches == row).nonzero().flatten()
    its = batch.input_ids.split(batch.branch_lengths.tolist())
    return [its[i].tolist() for i in own.tolist()]


def test_a_row_has_the_sequences_of_its_agent(root: Path, told: dict[str, str]) -> None:
    """The agent's own, two sub-agents', and that of the shortened history, each as the template has it."""
    assert told["sub agents"] == ""
    batch, tokenizer = rollout(root, "sub agents"), AutoTokenizer.from_pretrained(root / "policy")
    assert batch.rows_of_branches.bincount().tolist() == [NUM_SEQUENCES] * 16
    for row in range(16):
        question = f"<|user|>{row // 4}+{row // 4}={END}<|assistant|>"
        texts = [tokenizer.decode(ids) for ids in sequences(batch, row)]
        assert texts[0].startswith(question) and texts[0].count("<|assistant|>") >= 2
        told_apart = [text for text in texts[1:] if text.startswith(f"<|system|>one{END}{question}")]
        assert len(told_apart) == 1 and f"<|user|>again{END}<|assistant|>" in told_apart[0]
        assert sum(text.startswith(f"<|system|>two{END}{question}") for text in texts[1:]) == 1
        assert sum(text.startswith("<|user|>so far ") for text in texts[1:]) == 1
    row = metrics(root, "sub agents")[0]
    assert float(row["environment/sequences_mean"]) == NUM_SEQUENCES == float(row["environment/sequences_max"])
    assert float(row["environment/turns_mean"]) == 7 and float(row["environment/dropped_turns"]) == 0
    assert float(row["rollout/log_prob_diff_max"]) < 1e-4


def test_log_probs_of_each_sequence_are_one_pass_of_huggingface(root: Path, told: dict[str, str]) -> None:
    for name in ("sub agents", "rewriting"):
        assert furthest_log_prob(root, rollout(root, name)) < 1e-4, name


def test_a_row_has_one_advantage(root: Path, told: dict[str, str]) -> None:
    found = tensors(root, "sub agents")
    mask, lengths = found["response_mask"], found["lengths"].tolist()
    scores = found["environment_rewards"][:, 0].view(4, 4)
    expected = ((scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)).flatten()
    for own, there, advantage in zip(found["advantages"].split(lengths), mask.split(lengths), expected, strict=True):
        assert torch.allclose(own[there], advantage, atol=1e-4) and (own[~there] == 0).all()


def gradient_norm(root: Path, found: dict[str, Tensor], batch: RolloutBatch) -> float:
    """Of a first step by HuggingFace: each row has the weight of one, spread over the tokens of all its sequences."""
    model = AutoModelForCausalLM.from_pretrained(root / "policy")
    model.get_input_embeddings().padding_idx = None  # a pad token that was sampled is a token
    counts = [int(own.sum()) for own in batch.response_mask.split(batch.lengths.tolist())]
    at = 0
    for row, length in zip(batch.rows_of_branches.tolist(), batch.branch_lengths.tolist(), strict=True):
        own = slice(at, at + length)
        ids, mask = batch.input_ids[own], batch.response_mask[own]
        log_probs = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None]).flatten()
        earned = (log_probs * found["advantages"][own][1:])[mask[1:]].sum()
        (-earned / counts[row] / len(batch)).backward()
        at += length
    return float(torch.stack([x.grad.square().sum() for x in model.parameters() if x.grad is not None]).sum().sqrt())


def test_the_gradient_is_that_of_huggingface_however_rows_are_cut(
    root: Path, told: dict[str, str], on_two: None
) -> None:
    """Branches of a row go to other micro-batches and other replicas."""
    batch, found = rollout(root, "one step"), tensors(root, "one step")
    expected = gradient_norm(root, found, batch)
    assert expected > 0.01
    for name in ("one step", "small", "at dp 2"):
        assert float(metrics(root, name)[0]["actor/grad_norm"]) == pytest.approx(expected, rel=1e-5), name
        assert torch.equal(tensors(root, name)["input_ids"], batch.input_ids), name


def test_tokens_do_not_depend_on_who_asks_first(root: Path, told: dict[str, str], on_two: None) -> None:
    """Sub-agents that take their time, on one rank and where two share an engine."""
    one = tensors(root, "sub agents")
    for name in ("again", "at tp 2"):
        other = tensors(root, name)
        for field in FIELDS - {"rollout_log_probs"}:
            assert torch.equal(one[field], other[field]), (name, field)
        assert torch.allclose(one["rollout_log_probs"], other["rollout_log_probs"], atol=1e-4), name


def test_nor_where_the_first_requests_of_a_row_come_together(root: Path, told: dict[str, str], on_two: None) -> None:
    """Two of which are the same."""
    one = tensors(root, "together")
    assert rollout(root, "together").rows_of_branches.bincount().tolist() == [3] * 16
    assert furthest_log_prob(root, rollout(root, "together")) < 1e-4
    for name in ("together again", "together at tp 2"):
        other = tensors(root, name)
        for field in FIELDS - {"rollout_log_probs"}:
            assert torch.equal(one[field], other[field]), (name, field)


def test_ppo_judges_each_sequence_by_itself(root: Path, told: dict[str, str]) -> None:
    """The score of the row is earned at the end of each."""
    assert told["ppo"] == ""
    found, batch = tensors(root, "ppo"), rollout(root, "ppo")
    own = found["response_mask"]
    earned = [float(x.sum()) for x in found["rewards"].split(batch.branch_lengths.tolist())]
    expected = found["environment_rewards"][:, 0][batch.rows_of_branches]
    assert earned == pytest.approx(expected.tolist()) and (found["advantages"][~own] == 0).all()
    assert float(metrics(root, "ppo")[0]["rollout/log_prob_diff_max"]) < 1e-4


def test_dynamic_sampling_keeps_sequences(root: Path, told: dict[str, str]) -> None:
    assert told["dynamic"] == ""
    batch = rollout(root, "dynamic", 2)
    assert batch.rows_of_branches.bincount().tolist() == [NUM_SEQUENCES] * 16
    assert float(metrics(root, "dynamic")[1]["rollout/log_prob_diff_max"]) < 1e-4


def test_a_template_that_rewrites_turns_gives_a_sequence_to_each(root: Path, told: dict[str, str]) -> None:
    assert told["rewriting"] == ""
    batch, tokenizer = rollout(root, "rewriting"), AutoTokenizer.from_pretrained(root / "policy")
    several = 0
    for row in range(16):
        first, *others = [tokenizer.decode(ids) for ids in sequences(batch, row)]
        question = f"<|system|>add fails {END}<|user|>{row // 4}+{row // 4}={END}<|assistant|>"
        assert first.startswith(question) and not first.startswith(f"{question}- ")
        assert all(text.startswith(f"{question}- ") for text in others)
        several += bool(others)
    assert several > 8


def test_a_replay_reads_sequences_as_the_run_did(root: Path, told: dict[str, str]) -> None:
    name = ("name=replayed", "checkpoint.load=none")
    run_ranks(
        1, "hybridflow.train", "--replay", root / "runs" / "one_step", root / "config.yaml", agent(), *ONE_STEP, *name
    )
    then, now = tensors(root, "one step"), tensors(root, "replayed-replay")
    assert then.keys() == now.keys() and "branch_starts" in now
    for field, x in then.items():
        assert torch.equal(x, now[field]) or torch.allclose(x.float(), now[field].float(), atol=1e-6), field


def test_samples_show_where_sequences_begin(root: Path, told: dict[str, str]) -> None:
    lines = (root / "runs" / "sub_agents" / "samples.jsonl").read_text().splitlines()
    for sample in map(json.loads, lines):
        assert sum(turn.get("begins", False) for turn in sample["turns"]) == NUM_SEQUENCES - 1
    assert lines


def test_without_the_key_another_conversation_is_refused(told: dict[str, str]) -> None:
    assert "data.environment.earlier_turns: branch begins another sequence of the row then" in told["refused"]
