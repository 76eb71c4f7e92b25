"""Talking to a model: what is answered is what transformers would generate, on stdout alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridflow.cli.chat import ChatPrompts, model_directory, prompts_of_run, whole_model
from hybridflow.convert.to_megatron import to_megatron
from hybridflow.errors import ConfigError, RunDirError
from tests.distributed.tiny_experiment import make_inputs
from tests.launch import ROOT
from tests.peft_models import save_as_run, write_by_hand


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


def test_a_run_that_went_on_is_its_last_checkpoint(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """hf/ is of the end before, until the run ends again. The checkpoint is converted."""
    actor, starts = tmp_path / "checkpoints" / "step_000007" / "actor", tmp_path / "starts.jsonl"
    to_megatron(policy, actor)
    (tmp_path / "config.yaml").write_text("name: x\n")
    assert model_directory(tmp_path) == actor, "before there is hf/"
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    began = {"began": 1.0, "command": "", "versions": {}, "commit": None, "process": ["m", 1, 1]}
    for ends, expected in (
        ([], tmp_path / "hf"),
        (["finished"], tmp_path / "hf"),
        (["finished", None], actor),
        (["finished", "stopped"], actor),
        (["failed", "finished"], tmp_path / "hf"),
    ):
        lines = [(began, {"ended": 2.0, "how": how, "why": ""}) for how in ends]
        starts.write_text("".join(f"{json.dumps(line)}\n" for pair in lines for line in pair if line.get("how", 1)))
        assert model_directory(tmp_path) == expected, ends
        assert ("step_000007" in capsys.readouterr().err) == (expected == actor)
    with whole_model(actor, None) as whole:
        weights, base = load_file(whole / "model.safetensors"), load_file(policy / "model.safetensors")
    assert weights.keys() == base.keys() and all(torch.equal(weights[name], base[name]) for name in base)


def test_adapters_are_merged_for_the_engine(policy: Path, tmp_path: Path) -> None:
    """A directory of PEFT, that of a run, and the last checkpoint of a run that has written no model yet."""
    modules = {f"model.layers.{layer}.self_attn.o_proj": (256, 256) for layer in range(2)}
    run = tmp_path / "run"
    (run / "checkpoints" / "step_000007").mkdir(parents=True)
    (run / "config.yaml").write_text("name: x\ndata: {chat_template: true}\n")
    adapter = write_by_hand(policy, run / "adapter", modules)
    (adapter / "base_weights.json").write_text('{"hf_overrides": {"max_position_embeddings": 999}}')
    actor = save_as_run(adapter, policy, run / "checkpoints" / "step_000007" / "actor")
    (run / "checkpoints" / "step_000007" / "manifest.json").write_text("{}")
    assert [model_directory(given) for given in (adapter, actor, run)] == [adapter, actor, actor]
    assert prompts_of_run(adapter) == (True, {})
    with whole_model(adapter, None) as one, whole_model(actor, str(policy)) as other:
        weights, base = load_file(one / "model.safetensors"), load_file(policy / "model.safetensors")
        again = load_file(other / "model.safetensors")
        assert all(torch.equal(weights[name], again[name]) for name in base)
        changed = {name.removesuffix(".weight") for name in base if not torch.equal(weights[name], base[name])}
        assert changed == set(modules)
        assert (one / "tokenizer.json").is_file()
        assert json.loads((one / "config.json").read_text())["max_position_embeddings"] == 999
    assert not one.exists() and not other.exists()
    with whole_model(policy, None) as whole:
        assert whole == policy


def test_what_chat_says_of_adapters(policy: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(RunDirError, match=r"--base x: .*policy holds no adapters of a base model"),
        whole_model(policy, "x"),
    ):
        pass
    adapter = write_by_hand(tmp_path / "gone", tmp_path / "adapter", {"model.layers.0.self_attn.o_proj": (256, 256)})
    told = rf"{adapter}/adapter_config.json: base_model_name_or_path = {tmp_path}/gone: no such directory here"
    with pytest.raises(ConfigError, match=told), whole_model(adapter, None):
        pass
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(RunDirError, match="is a checkpoint of megatron, which the engine does not read"):
        model_directory(tmp_path)


def test_what_is_no_model_is_told(tmp_path: Path) -> None:
    done = chat(tmp_path)
    told = f"hybridflow chat: error: {tmp_path}: is neither a run's directory nor a model's: no config.yaml and no"
    assert done.returncode == 1 and done.stderr.startswith(told) and done.stderr.count("\n") == 1


@pytest.mark.slow
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
    texts, chats = tmp_path / "texts.jsonl", tmp_path / "chats.jsonl"
    texts.write_text('{"prompt": "1", "completion": "2"}\n')
    chats.write_text('{"messages": [{"role": "user", "content": "1"}]}\n')
    (tmp_path / "hf").mkdir()
    for data, rendered in (
        ("{chat_template: true, chat_template_kwargs: {think: true}}", "12+"),
        ("{chat_template: true}", "12-"),
        ("{chat_template: false}", "12"),
        ("{batch_size: 1, chat_template_kwargs: {think: true}}", "12+"),
        (f"{{batch_size: 1, train: {texts}}}", "12"),
        (f"{{batch_size: 1, train: [{{path: {chats}}}]}}", "12-"),
        (f"{{batch_size: 1, train: {chats}, columns: {{messages: gone}}}}", "12-"),
    ):
        (tmp_path / "config.yaml").write_text(f"name: x\ndata: {data}\n")
        for given in (tmp_path, tmp_path / "hf"):
            made = ChatPrompts(tokenizer, *prompts_of_run(given))
            assert made.prompt("12") == tokenizer(rendered, add_special_tokens=False)["input_ids"], (data, given)
    (tmp_path / "config.yaml").unlink()
    assert prompts_of_run(tmp_path / "hf") == (None, {})
    assert ChatPrompts(tokenizer, None, {}).prompt("1") == tokenizer("1-", add_special_tokens=False)["input_ids"]
