"""Talking to a model: what is answered is what transformers would generate, on stdout alone."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridflow.cli.chat import ChatPrompts, model_directory, prompts_of_run
from hybridflow.errors import RunDirError
from tests.distributed.tiny_experiment import make_inputs
from tests.launch import ROOT


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("chat") / "inputs") / "policy"


def chat(*arguments: object, said: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hybridflow", "chat", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, input=said, capture_output=True, text=True, timeout=600)


def answer(policy: Path, prompt: str, num_tokens: int) -> str:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy), AutoTokenizer.from_pretrained(policy)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    made = model.generate(ids, max_new_tokens=num_tokens, do_sample=False)[0, ids.shape[1] :]
    return str(tokenizer.decode(made, skip_special_tokens=True))


@pytest.mark.thorough
def test_one_prompt_and_a_line_at_a_time(policy: Path) -> None:
    done = chat(policy, "--prompt", "12+7=", "--max-tokens", 6)
    assert (done.returncode, done.stdout) == (0, f"{answer(policy, '12+7=', 6)}\n"), done.stderr
    assert "Warning" not in done.stderr, "torch warns of how it binds memory"
    done = chat(policy, "--max-tokens", 6, said="12+7=\n\n1+1=\n/quit\n")
    assert done.returncode == 0
    for prompt in ("12+7=", "1+1="):
        assert f"> {answer(policy, prompt, 6)}\n" in done.stdout
    assert "no chat template: each line is a prompt of its own" in done.stdout


def test_a_run_is_its_trained_model(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")
    with pytest.raises(RunDirError, match="the run has written no model yet"):
        model_directory(tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    assert model_directory(tmp_path) == tmp_path / "hf"
    assert model_directory(policy) == policy


def test_what_is_no_model_is_told(tmp_path: Path) -> None:
    done = chat(tmp_path)
    told = f"hybridflow chat: error: {tmp_path}: is neither a run's directory nor a model's: no config.yaml and no"
    assert done.returncode == 1 and done.stderr.startswith(told) and done.stderr.count("\n") == 1


def test_a_reward_model_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (make_inputs(tmp_path / "inputs") / "reward").rename(run / "hf")
    done = chat(run, "--prompt", "12+7=")
    told = f"hybridflow chat: error: {run / 'hf'}: is a reward model: it scores an answer and writes none. Chat needs"
    assert done.returncode == 1 and done.stderr.startswith(told) and done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""


SAID = "{% for m in messages %}{{ m.content }}{% endfor %}"
THINKS = SAID + "{% if add_generation_prompt %}{{ '+' if think else '-' }}{% endif %}"


def test_prompts_are_made_as_the_run_made_them(policy: Path, tmp_path: Path) -> None:
    """With the arguments of its template, and without a template where it was trained without."""
    tokenizer = AutoTokenizer.from_pretrained(policy, chat_template=THINKS)
    (tmp_path / "hf").mkdir()
    for data, rendered in (
        ("{chat_template: true, chat_template_kwargs: {think: true}}", "12+"),
        ("{chat_template: true}", "12-"),
        ("{chat_template: false}", "12"),
        ("{batch_size: 1, chat_template_kwargs: {think: true}}", "12+"),
    ):
        (tmp_path / "config.yaml").write_text(f"name: x\ndata: {data}\n")
        for given in (tmp_path, tmp_path / "hf"):
            made = ChatPrompts(tokenizer, *prompts_of_run(given))
            assert made.prompt("12") == tokenizer(rendered, add_special_tokens=False)["input_ids"], (data, given)
    (tmp_path / "config.yaml").unlink()
    assert prompts_of_run(tmp_path / "hf") == (None, {})
    assert ChatPrompts(tokenizer, None, {}).prompt("1") == tokenizer("1-", add_special_tokens=False)["input_ids"]
