"""Episodes that verifiers' own training client plays, by token ids: what it records is the row that is trained on."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.agents.test_runs import furthest_log_prob, rollout, turns
from tests.agents.test_verifiers import with_verifiers
from tests.agents.train_client_agent import MAX_TOKENS
from tests.environments.tiny_chat import STOPS, make_chat_inputs, make_tokenizer, run_config
from tests.launch import ROOT, run_ranks
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.distributed

# As Qwen3's, without tools and thoughts.
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
OF_TURNS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
OF_THOUGHTS_AND_TOOLS = [f"<{end}{name}>" for name in ("think", "tool_call", "tool_response") for end in ("", "/")]
NUM_ROWS = 4


def policys_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(TEMPLATE)
    tokenizer.add_tokens(["\n"])
    tokenizer.add_tokens(OF_TURNS, special_tokens=True)
    return tokenizer


def renderers_tokenizer() -> PreTrainedTokenizerFast:
    """Has all tokens that the renderer of Qwen3 asks for; those of thoughts and tools the policy cannot say."""
    tokenizer = policys_tokenizer()
    tokenizer.add_tokens([f"<|unused_{number}|>" for number in range(len(tokenizer), VOCAB_SIZE)])
    tokenizer.add_tokens(OF_THOUGHTS_AND_TOOLS, special_tokens=True)
    assert tokenizer.convert_tokens_to_ids("</think>") >= VOCAB_SIZE
    return tokenizer


@pytest.fixture(scope="module")
def root(python: str, found_there: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = make_chat_inputs(tmp_path_factory.mktemp("runs"), template=TEMPLATE)
    policys_tokenizer().save_pretrained(root / "policy")
    renderers_tokenizer().save_pretrained(root / "renderer")
    (root / "recorded").mkdir()
    (root / "tasks.jsonl").write_text("".join(json.dumps({"task": task}) + "\n" for task in (0, 1)))
    config = run_config(root, max_response_length=64)
    config["num_iterations"], config["sampling"]["samples_per_prompt"] = 1, 2
    config["data"] |= {"train": str(root / "tasks.jsonl"), "prompts_per_iteration": 2}
    del config["data"]["heldout"]
    config["algorithm"]["update"]["mini_batch_size"] = NUM_ROWS
    config["sampling"]["stop_token_ids"] = [*STOPS, policys_tokenizer().convert_tokens_to_ids("<|endoftext|>")]
    (root / "config.yaml").write_text(json.dumps(config))
    arguments = {"python": python, "renderer": str(root / "renderer"), "out": str(root / "recorded")}
    agent = {"agent": "tests.agents.train_client_agent:play", "arguments": arguments, "max_turn_tokens": 16}
    case = ["data.environment=" + json.dumps({**agent, "num_workers": 1, "call_seconds": 300})]
    (root / "cases.json").write_text(json.dumps({"tokens": case}))
    files = [root / name for name in ("config.yaml", "told.json", "cases.json")]
    there = {"PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT)])}
    run_ranks(1, "tests.agents.verifiers_worker", *files, environment=there)
    assert json.loads((root / "told.json").read_text()) == {"tokens": ""}
    return root


@pytest.fixture(scope="module")
def recorded(root: Path) -> dict[int, dict[str, Any]]:
    """By row."""
    return {int(file.name.partition("-")[0]): json.loads(file.read_text()) for file in (root / "recorded").iterdir()}


@with_verifiers
def test_what_the_training_client_records_is_the_row(root: Path, recorded: dict[int, dict[str, Any]]) -> None:
    batch = rollout(root, "tokens")
    assert not batch.failed.any() and sorted(recorded) == list(range(NUM_ROWS))
    ids, masks, log_probs = (
        values.split(batch.lengths.tolist())
        for values in (batch.input_ids, batch.response_mask, batch.rollout_log_probs)
    )
    for row in range(NUM_ROWS):
        [branch] = recorded[row]["branches"]
        assert branch["token_ids"] == ids[row].tolist() and branch["mask"] == masks[row].tolist()
        assert torch.allclose(torch.tensor(branch["log_probs"]), log_probs[row], rtol=0, atol=1e-6)
        assert batch.environment_rewards[row].tolist() == pytest.approx([recorded[row]["reward"]])
    sampled = batch.rollout_log_probs[batch.response_mask]
    assert len(sampled) > 20 and (sampled < 0).all()


@with_verifiers
def test_a_second_request_goes_on_behind_what_was_sampled(root: Path) -> None:
    """A turn without its end token gets it from the client, which asks for fewer tokens than the config allows."""
    batch, tokenizer = rollout(root, "tokens"), AutoTokenizer.from_pretrained(root / "policy")
    assert furthest_log_prob(root, batch) < 1e-4
    assistant, ends, longest = "<|im_start|>assistant\n", [], 0
    for row, ids in enumerate(batch.input_ids.split(batch.lengths.tolist())):
        question = f"<|im_start|>user\n{row // 2}+{row // 2}=<|im_end|>\n"
        assert tokenizer.decode(ids[: int(batch.prompt_lengths[row])]) == question + assistant
        (_, said), (by_model, written), (_, answer) = turns(batch, row)
        ends.append(tokenizer.decode(said[-1]) in ("<|im_end|>", "<|endoftext|>"))
        end = "" if ends[-1] else "<|im_end|>"
        assert not by_model
        assert tokenizer.decode(written) == f"{end}\n<|im_start|>user\nmore<|im_end|>\n{assistant}"
        longest = max(longest, len(said), len(answer))
    assert not all(ends) and longest == MAX_TOKENS
