"""Whole runs: alike under one seed, the same responses in any layout, and PPO by hand on a batch of theirs.

The second half reads the batch that the first iteration trained on and computes it again, one sequence at a time in
float64, from the equations and not from hybridflow/algorithms.
"""

import csv
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.distributed.layouts_worker import LAYOUTS, NUM_RANKS, PROMPTS, SCORED
from tests.distributed.tiny_experiment import PROMPTS_PER_ITERATION, make_inputs, make_uneven_prompts, write_config
from tests.distributed.waiting_worker import LATE, WAYS
from tests.launch import run_ranks, torchrun
from tests.tiny_models import make_tokenizer

END, END_BIAS = 2, 2.5  # the end token, and what makes it likelier
SAMPLES_PER_PROMPT = 2
MAX_RESPONSE_LENGTH, TEMPERATURE, GAMMA, GAE_LAMBDA, KL_COEF = 8, 0.8, 0.97, 0.9, 0.1
OVERRIDES = (
    f"sampling.samples_per_prompt={SAMPLES_PER_PROMPT}",
    f"sampling.temperature={TEMPERATURE}",
    f"sampling.logit_bias={{{END}: {END_BIAS}}}",  # so that lengths vary
    f"algorithm.gamma={GAMMA}",
    f"algorithm.gae_lambda={GAE_LAMBDA}",
    f"algorithm.kl.coef={KL_COEF}",
    "data.shuffle=true",
    f"data.prompts_per_iteration={PROMPTS_PER_ITERATION}",
    "metrics.dump_batches=true",
)
BY_PROMPT_LENGTH = [{"up_to": 5, "samples_per_prompt": 3, "temperature": 1.2, "max_response_length": 5}]
EVALUATION = ("metrics.eval_interval=2", "metrics.eval_reward=hybridflow.rewards:exact_match")
# columns of metrics.csv that measure the machine
MEASURED = re.compile(r"(time|speed|memory)/.*|reshard/seconds|.*_ms|.*tokens_per_sec")

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def runs(inputs, tmp_path_factory) -> tuple[Path, Path]:
    """Run directories of one config, on two ranks by torchrun and on two forks: the actor tp 2, the others dp 2."""
    arguments = [*OVERRIDES, "num_iterations=3", *evaluation(inputs)]
    configs = [write_config(tmp_path_factory.mktemp("run") / "config.yaml", inputs) for _ in range(2)]
    torchrun(2, "-m", "hybridflow.train", configs[0], *arguments)
    run_ranks(2, "hybridflow.train", configs[1], *arguments)
    return configs[0].parent / "run", configs[1].parent / "run"


@pytest.fixture(scope="module")
def batch(runs) -> dict[str, Tensor]:
    return dumped(runs[0], 1)


@pytest.fixture(scope="module")
def sequences(batch) -> list[dict[str, Tensor]]:
    """The token-level tensors of each sequence."""
    lengths = batch["lengths"].tolist()
    pieces = {name: x.split(lengths) for name, x in batch.items() if len(x) == sum(lengths)}
    return [{name: pieces[name][i] for name in pieces} for i in range(len(lengths))]


# ---- the same again


def test_same_seed_gives_the_same_metrics(runs):
    first, second = (metrics(path) for path in runs)
    assert [row["iteration"] for row in first] == ["0", "1", "2", "3"]
    assert {"reward/score_mean", "actor/loss", "critic/grad_norm", "eval/accuracy"} <= first[0].keys()
    assert first == second


def test_same_seed_gives_the_same_samples(runs):
    first, second = ((path / "samples.jsonl").read_bytes() for path in runs)
    written = [json.loads(line) for line in first.splitlines()]
    of_training = [sample["iteration"] for sample in written if sample["kind"] == "train"]
    assert of_training == [1] * 4 + [2] * 4 + [3] * 4
    assert len(written) > len(of_training), "evaluations have samples too"
    assert first == second


def test_same_seed_gives_the_same_batches(runs):
    for iteration in (1, 2, 3):
        first, second = (dumped(path, iteration) for path in runs)
        assert first.keys() == second.keys()
        different = [name for name in first if not torch.equal(first[name], second[name])]
        assert not different, f"iteration {iteration}: {different}"


@pytest.fixture(scope="module")
def responses(inputs, tmp_path_factory) -> dict[str, dict]:
    """What each layout of the worker generated."""
    root = tmp_path_factory.mktemp("layouts")
    config = write_config(root / "config.yaml", inputs)
    by_length = [
        f"data.train={make_uneven_prompts(root / 'uneven.jsonl')}",
        f"sampling.by_prompt_length={json.dumps(BY_PROMPT_LENGTH)}",
    ]
    arguments = [config, root / "responses.pt", *OVERRIDES, *by_length, "algorithm.update.mini_batch_size=4"]
    run_ranks(NUM_RANKS, "tests.distributed.layouts_worker", *arguments)
    return torch.load(root / "responses.pt")


@pytest.mark.thorough
def test_replicas_lie_where_the_layouts_say(responses):
    assert {name: result["replicas"] for name, result in responses.items()} == {
        "one replica": ((3,),),
        "two replicas": ((0,), (2,)),
        "four replicas": ((0,), (1,), (2,), (3,)),
        "tp2": ((0, 1), (2, 3)),
        "tp1 of tp2": ((0,), (1,), (2,), (3,)),
        "pp2": ((0, 1), (2, 3)),
        "tp2 pp2": ((0, 1, 2, 3),),
        "cp2": ((0, 1), (2, 3)),
        "tp2 on its own ranks": ((2, 3),),
    }


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["sampled", "greedy"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one replica"])
def test_same_prompts_give_the_same_responses_in_any_layout(layout, kind, responses):
    """Tokens bit for bit, whatever the number of replicas and the cut of the engine; log-probs up to rounding."""
    one, other = responses["one replica"][kind], responses[layout][kind]
    for name in ("input_ids", "lengths", "prompt_lengths", "prompt_indices", "truncated", "response_mask"):
        assert torch.equal(one[name], other[name]), name
    torch.testing.assert_close(one["rollout_log_probs"], other["rollout_log_probs"], atol=1e-5, rtol=1e-5)


@pytest.mark.thorough
def test_samples_of_a_prompt_differ_and_are_as_many_and_as_long_as_its_length_says(responses):
    """Else that they are alike in every layout would prove little. Up to 5 tokens are short."""
    sampled, greedy = responses["one replica"]["sampled"], responses["one replica"]["greedy"]
    assert greedy["prompt_lengths"].tolist() == [4, 6, 8, 10, 5, 7] and len(PROMPTS) == 6
    assert sampled["prompt_indices"].tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 5, 5]
    for x in (sampled, greedy):
        limits = torch.where(x["prompt_lengths"] <= 5, 5, MAX_RESPONSE_LENGTH)
        counts = x["lengths"] - x["prompt_lengths"]
        assert (counts <= limits).all() and (counts[x["truncated"]] == limits[x["truncated"]]).all()
        assert x["truncated"].any() and (counts > 5).any()
    tokens = [x.tolist() for x in sampled["input_ids"].split(sampled["lengths"].tolist())]
    groups = [{tuple(tokens[row]) for row in range(14) if sampled["prompt_indices"][row] == p} for p in range(6)]
    assert sum(len(group) > 1 for group in groups) >= 5


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.parametrize("layout", SCORED)
def test_results_do_not_depend_on_who_waited_for_whom(layout, way, responses):
    """Bit for bit. Functions see a row, the responses to a prompt, or the rollout; one sets a signal's handler."""
    first, other = (responses[layout]["scored"][x]["tensors"] for x in (WAYS[0], way))
    assert {"raw_scores", "log_probs", "ref_log_probs", "values", "reward/part_model_0_mean"} <= first.keys()
    assert first.keys() == other.keys()
    different = [name for name in first if not torch.equal(first[name], other[name])]
    assert not different


@pytest.mark.thorough
@pytest.mark.parametrize("layout", SCORED[1:])
def test_scored_while_waiting_is_what_one_replica_makes_of_it(layout, responses):
    one, other = (responses[x]["scored"][WAYS[1]]["tensors"] for x in (SCORED[0], layout))
    assert one["values"].abs().max() > 0.1
    assert one["lengths"].min() <= 10 < one["lengths"].max(), "cp2: rows of one rank, and rows that ranks share"
    for name, whole in one.items():
        torch.testing.assert_close(other[name], whole, atol=1e-5, rtol=1e-5)


@pytest.mark.thorough
def test_what_was_computed_ahead_is_forgotten_with_the_weights(responses):
    """A reference that becomes the actor has the actor's log-probs, whatever it has run before."""
    before, after = responses["four replicas"]["kl"]
    assert before > 0.1 and after < 1e-4  # units and whole batches are summed in other orders


@pytest.mark.thorough
def test_who_waits_computes_ahead(responses):
    """Units that ranks have run before the rollout was whole: 4 models run those of 3 prompts, a unit a row.

    While a replica waits for its last response the others run all other units, those of that replica too.
    """
    scored = {layout: responses[layout]["scored"] for layout in SCORED}
    assert not any(any(x["ahead"]) for x in scored["one replica"].values())
    for layout in SCORED[1:]:
        num_rows = len(scored[layout][WAYS[0]]["tensors"]["lengths"])
        assert not any(scored[layout]["nobody computes ahead"]["ahead"] + scored[layout]["it was kept"]["ahead"])
        assert sum(scored[layout]["all compute ahead"]["ahead"]) == 4 * num_rows
        for x in (scored[layout][way] for way in LATE):
            assert sum(x["ahead"]) == 4 * (num_rows - 1) and not any(x["ahead"][rank] for rank in x["late"])
            assert max(x["seconds"]) > 0


# ---- what the dumped batch holds


def test_batch_is_made_of_prompts_and_their_responses(batch, sequences, inputs):
    prompts = [json.loads(line)["prompt"] for line in (inputs / "train.jsonl").read_text().splitlines()]
    known = {tuple(ids) for ids in make_tokenizer()(prompts)["input_ids"]}
    length_of = batch["prompt_lengths"].tolist()
    asked = [tuple(x["input_ids"][:n].tolist()) for x, n in zip(sequences, length_of, strict=True)]
    assert batch["prompt_indices"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert set(asked) <= known and asked[0::2] == asked[1::2] and len(set(asked)) == PROMPTS_PER_ITERATION
    for i, x in enumerate(sequences):
        response = x["input_ids"][length_of[i] :].tolist()
        assert 0 < len(response) <= MAX_RESPONSE_LENGTH
        assert END not in response[:-1]
        assert bool(batch["truncated"][i]) == (response[-1] != END)
        assert x["response_mask"].tolist() == [False] * length_of[i] + [True] * len(response)
    assert len(batch["lengths"].unique()) > 1 and batch["truncated"].any() and not batch["truncated"].all()


@pytest.mark.parametrize(
    "name", ["rollout_log_probs", "log_probs", "ref_log_probs", "values", "rewards", "advantages", "returns"]
)
def test_token_tensors_are_zero_outside_the_response(name, batch):
    mask = batch["response_mask"]
    assert batch[name].dtype == torch.float32
    assert batch[name][~mask].eq(0).all() and batch[name][mask].ne(0).all()


@pytest.mark.parametrize(
    ("name", "model", "end_bias"),
    [("log_probs", "policy", 0.0), ("ref_log_probs", "reference", 0.0), ("rollout_log_probs", "policy", END_BIAS)],
)
def test_log_probs_are_of_the_token_given_what_precedes_it(name, model, end_bias, sequences, inputs):
    """The engine's are of the distribution that it drew from, bias included; the trainer's of the model."""
    network = AutoModelForCausalLM.from_pretrained(inputs / model)
    for x in sequences:
        with torch.no_grad():
            logits = network(x["input_ids"][None]).logits[0]
        logits[:, END] += end_bias
        log_probs = (logits[:-1] / TEMPERATURE).log_softmax(-1)
        expected = log_probs.gather(1, x["input_ids"][1:, None])[:, 0]
        mask = x["response_mask"]
        torch.testing.assert_close(x[name][mask], expected[mask[1:]], atol=1e-5, rtol=1e-5)


def test_rewards_advantages_and_returns_by_hand(batch, sequences):
    scores = batch["scores"].tolist()
    by_hand = [estimated(x, score) for x, score in zip(sequences, scores, strict=True)]
    rewards, advantages, returns = (list(itertools.chain(*column)) for column in zip(*by_hand, strict=True))
    mean = sum(advantages) / len(advantages)
    variance = sum((a - mean) ** 2 for a in advantages) / (len(advantages) - 1)
    whitened = [(a - mean) / (variance + 1e-8) ** 0.5 for a in advantages]
    mask = batch["response_mask"]
    for name, expected in (("rewards", rewards), ("returns", returns), ("advantages", whitened)):
        assert batch[name][mask].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5), name


def estimated(x: dict[str, Tensor], score: float) -> tuple[list[float], list[float], list[float]]:
    """Token rewards, advantages before whitening, and returns of one response: k1 penalty, GAE."""
    mask = x["response_mask"]
    log_probs, ref_log_probs, values = (x[name][mask].tolist() for name in ("log_probs", "ref_log_probs", "values"))
    rewards = [-KL_COEF * (p - q) for p, q in zip(log_probs, ref_log_probs, strict=True)]
    rewards[-1] += score
    advantages: list[float] = []
    advantage = next_value = 0.0  # of the state after the last token
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + GAMMA * next_value - value + GAMMA * GAE_LAMBDA * advantage
        next_value = value
        advantages.insert(0, advantage)
    return rewards, advantages, [a + v for a, v in zip(advantages, values, strict=True)]


# ---- how they are read


def evaluation(inputs: Path) -> tuple[str, ...]:
    return (f"data.heldout={inputs / 'heldout.jsonl'}", *EVALUATION)


def metrics(path: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv as they are written, without what is measured."""
    with (path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: cell for name, cell in row.items() if not MEASURED.fullmatch(name)} for row in rows]


def dumped(path: Path, iteration: int) -> dict[str, Tensor]:
    return load_file(path / "batches" / f"iteration_{iteration:06d}.safetensors")
