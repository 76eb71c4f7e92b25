"""Dynamic sampling: which groups an iteration trains on, what is kept for the next, and that a run goes on with it."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridflow.batch import RolloutBatch, response_mask
from hybridflow.checkpoint.state import RunState, SavedRun, load_state, write_state
from hybridflow.config import ExperimentConfig
from hybridflow.config.algorithms import DynamicSampling
from hybridflow.config.length_buckets import LengthBuckets, always
from hybridflow.errors import ConfigError
from hybridflow.flows.dynamic_sampling import SURPLUS, sample_groups, with_records
from hybridflow.models.routing import RoutingSizes
from hybridflow.parallel.layout import Layout, RolloutLayout
from hybridflow.rollout.routing_records import RoutingRecords
from tests.distributed.tiny_experiment import make_inputs, make_uneven_prompts, write_config
from tests.launch import run_ranks
from tests.rollout.simulated_exchange import SimulatedExchange, SimulatedGroup

SAMPLES, END = 2, 2  # the end token


class Known:
    def __init__(self, raw_scores: Tensor) -> None:
        self.raw_scores = raw_scores


class Run:
    """What `sample_groups` uses of a Run: prompts 0, 1, 2, ... of which `scores` says the scores, one a sample.

    Prompt p has 1 + p % 2 tokens.
    """

    def __init__(self, scores: dict[int, tuple[float, ...]], count: int, state: RunState | None = None) -> None:
        self._scores, self._count = scores, count
        self.prompts_per_iteration = count
        self.state, self.metrics, self.lines = state or RunState(), dict[str, Tensor](), list[str]()
        self.samples, self.iteration = always(SAMPLES), 1
        self.draw()

    def draw(self) -> None:
        first = self.state.num_prompts_drawn
        self.prompt_rows = tuple(range(first, first + self._count))
        self.state = replace(self.state, num_prompts_drawn=first + self._count)

    def generate(self) -> RolloutBatch:
        """A row is its prompt, once or twice, and the number of its sample."""
        samples = {prompt: self.samples.for_length(1 + prompt % 2) for prompt in self.prompt_rows}
        rows = [[prompt] * (1 + prompt % 2) + [i] for prompt, count in samples.items() for i in range(count)]
        lengths = torch.tensor([len(row) for row in rows])
        prompt_lengths = lengths - 1
        mask = response_mask(lengths, prompt_lengths)
        indices = torch.arange(self._count).repeat_interleave(torch.tensor(list(samples.values())))
        ids = torch.tensor([token for row in rows for token in row])
        return RolloutBatch(
            ids, lengths, prompt_lengths, indices, torch.zeros(len(rows), dtype=torch.bool), mask, -ids.float()
        )

    def scores(self, rollout: RolloutBatch) -> Tensor:
        return torch.tensor([score for prompt in self.prompt_rows for score in self._scores[prompt]])

    def whole(self, raw_scores: Tensor) -> Known:
        self.score_parts = {"half": raw_scores / 2}
        return Known(raw_scores)

    def take(self, prompt_rows: tuple[int, ...], rollout: RolloutBatch, parts: dict[str, Tensor]) -> None:
        self.prompt_rows, self.rollout, self.score_parts = prompt_rows, rollout, parts

    def say(self, line: str) -> None:
        self.lines.append(line)


LIVE, DEAD = (0.0, 1.0), (1.0, 1.0)


def kept(state: RunState) -> tuple[int, ...]:
    """Numbers of the prompts whose groups come first in the next iteration."""
    return tuple(state.kept[SURPLUS]["prompts"].tolist()) if SURPLUS in state.kept else ()


def counts(run: Run) -> dict[str, float]:
    return {name.removeprefix("rollout/"): float(value) for name, value in run.metrics.items()}


def test_groups_of_equal_scores_are_replaced_by_later_ones() -> None:
    run = Run({0: LIVE, 1: DEAD, 2: DEAD, 3: LIVE, 4: LIVE, 5: (2.0, 1.0)}, count=3)
    rollout, scores = sample_groups(run, DynamicSampling())
    assert run.prompt_rows == (0, 3, 4) and run.state.num_prompts_drawn == 6
    assert rollout.input_ids.tolist() == [0, 0, 0, 1, 3, 3, 0, 3, 3, 1, 4, 0, 4, 1]
    assert rollout.prompt_indices.tolist() == [0, 0, 1, 1, 2, 2]
    assert rollout.rollout_log_probs.tolist() == [-x for x in rollout.input_ids.tolist()]
    assert scores.tolist() == [0, 1, 0, 1, 0, 1]
    assert {name: part.tolist() for name, part in run.score_parts.items()} == {"half": [0, 0.5, 0, 0.5, 0, 0.5]}
    assert counts(run) == {
        "generation_rounds": 2,
        "groups_generated": 6,
        "groups_equal": 2,
        "groups_filled": 0,
        "groups_surplus": 1,
    }
    assert run.lines == [
        "iteration 1: 6 groups generated in 2 rounds, 2 of them with equal scores; 0 from before, 1 kept for the next"
    ]
    run.iteration = 2
    run.draw()
    run._scores |= {6: DEAD, 7: LIVE, 8: LIVE}
    rollout, scores = sample_groups(run, DynamicSampling())
    assert run.prompt_rows == (5, 7, 8) and scores.tolist() == [2, 1, 0, 1, 0, 1]
    assert run.score_parts["half"].tolist() == [1.0, 0.5, 0, 0.5, 0, 0.5], "of the surplus too"
    assert kept(run.state) == () and counts(run)["generation_rounds"] == 1


def test_a_surplus_may_be_dropped() -> None:
    run = Run({0: LIVE, 1: DEAD, 2: LIVE, 3: LIVE}, count=2)
    sample_groups(run, DynamicSampling(surplus="drop"))
    assert run.prompt_rows == (0, 2) and kept(run.state) == ()
    assert "1 dropped" in run.lines[0]


def test_rounds_are_bounded_and_what_is_missing_is_filled_up() -> None:
    run = Run({0: DEAD, 1: DEAD, 2: LIVE, 3: DEAD, 4: LIVE, 5: LIVE}, count=2)
    rollout, scores = sample_groups(run, DynamicSampling(max_generation_rounds=2))
    assert run.prompt_rows == (2, 0) and scores.tolist() == [0, 1, 1, 1]
    assert rollout.prompt_indices.tolist() == [0, 0, 1, 1]
    assert counts(run)["groups_filled"] == 1 and counts(run)["generation_rounds"] == 2
    assert run.lines[0].endswith("; 1 of equal scores fill the batch (max_generation_rounds)")


def test_with_nothing_to_learn_from_the_first_round_is_the_batch() -> None:
    run = Run({i: DEAD for i in range(6)}, count=2)
    _, scores = sample_groups(run, DynamicSampling(max_generation_rounds=3))
    assert run.prompt_rows == (0, 1) and scores.tolist() == [1, 1, 1, 1] and run.state.num_prompts_drawn == 6


def test_a_surplus_of_another_group_size_is_left_out() -> None:
    run = Run({0: LIVE, 1: LIVE, 2: LIVE, 3: DEAD}, count=2)
    run._scores[1] = DEAD
    sample_groups(run, DynamicSampling())
    run = Run({i: (0.0, 1.0, 2.0) for i in range(8)}, count=2, state=run.state)
    run.samples = always(3)
    run.state = replace(run.state, num_prompts_drawn=4)
    run.draw()
    sample_groups(run, DynamicSampling())
    assert run.prompt_rows == (4, 5)


def test_groups_may_differ_in_size() -> None:
    """Three responses to prompts of two tokens, the odd ones: kept, filled up and carried over."""
    scores = {0: DEAD, 1: (0.0, 0.0, 2.0), 2: LIVE, 3: (5.0, 4.0, 3.0), 4: DEAD, 5: (1.0, 1.0, 1.0)}
    run = Run(scores, count=2)
    run.samples = LengthBuckets((1,), (2, 3))
    rollout, raw = sample_groups(run, DynamicSampling())
    assert run.prompt_rows == (1, 2) and raw.tolist() == [0, 0, 2, 0, 1]
    assert rollout.prompt_indices.tolist() == [0, 0, 0, 1, 1]
    assert rollout.input_ids.tolist() == [1, 1, 0, 1, 1, 1, 1, 1, 2, 2, 0, 2, 1]
    assert kept(run.state) == (3,)
    run.iteration = 2
    run.draw()
    rollout, raw = sample_groups(run, DynamicSampling(max_generation_rounds=1))
    assert run.prompt_rows == (3, 4) and raw.tolist() == [5, 4, 3, 1, 1]
    assert rollout.prompt_indices.tolist() == [0, 0, 0, 1, 1] and rollout.prompt_lengths.tolist() == [2, 2, 2, 1, 1]
    assert counts(run)["groups_filled"] == 1 and counts(run)["groups_equal"] == 2


@pytest.mark.parametrize(
    ("sizes", "goes_on"), [(LengthBuckets((1,), (2, 3)), True), (LengthBuckets((1,), (3, 2)), False)]
)
def test_a_surplus_goes_on_where_its_groups_have_the_sizes_asked_for(sizes: LengthBuckets[int], goes_on: bool) -> None:
    run = Run({0: DEAD, 1: (0.0, 0.0, 2.0), 2: LIVE, 3: (5.0, 4.0, 3.0)}, count=2)
    run.samples = LengthBuckets((1,), (2, 3))
    sample_groups(run, DynamicSampling())
    assert kept(run.state) == (3,)
    later = Run(
        {4: (0.0, 1.0, 2.0)[: sizes.for_length(1)], 5: (0.0, 1.0, 2.0)[: sizes.for_length(2)]}, count=2, state=run.state
    )
    later.samples = sizes
    sample_groups(later, DynamicSampling())
    assert later.prompt_rows == ((3, 4) if goes_on else (4, 5))


def test_no_prompt_is_left_out_where_the_surplus_fills_a_batch() -> None:
    """As on a resume with fewer prompts an iteration."""
    run = Run({0: DEAD, 1: LIVE, 2: LIVE, 3: LIVE, 4: LIVE, 5: LIVE, 6: LIVE, 7: DEAD}, count=3)
    sample_groups(run, DynamicSampling())
    assert run.prompt_rows == (1, 2, 3) and kept(run.state) == (4, 5)
    smaller = Run(run._scores, count=2, state=run.state)
    sample_groups(smaller, DynamicSampling())
    assert smaller.prompt_rows == (4, 5) and smaller.state.num_prompts_drawn == 8
    assert kept(smaller.state) == (6,)


class Routed(Run):
    """The experts of a token are its id and those after it. records: of the one rank of the run."""

    def __init__(self, *args: Any, records: RoutingRecords, **named: Any) -> None:
        self.records = records
        super().__init__(*args, **named)

    def generate(self) -> RolloutBatch:
        rollout = super().generate()
        experts = rollout.input_ids[:, None, None] + torch.arange(6).view(2, 3)
        return self.records.take(rollout, experts.to(torch.uint8))


def records_of_one_rank() -> RoutingRecords:
    exchange: Any = SimulatedExchange(SimulatedGroup([0], {}), 0)
    sizes = RoutingSizes(num_layers=2, chosen=3, num_experts=32)
    engines = RolloutLayout(1, 1, ((0,),)), ((0, 1),)
    return RoutingRecords(sizes, Layout(1, 1, 1, (0,)), rank=0, world=exchange, replicas=exchange, engines=engines)


def test_a_surplus_has_the_engines_experts(tmp_path: Path) -> None:
    """Of 2 layers, 3 a token: they stay with their tokens through a checkpoint and into the next iteration's batch."""
    before, after = records_of_one_rank(), records_of_one_rank()
    run = Routed({0: DEAD, 1: LIVE, 2: LIVE, 3: LIVE, 4: LIVE, 5: LIVE}, count=2, records=before)
    sample_groups(run, DynamicSampling())
    state = run.state.keeping(SURPLUS, before.portable(run.state.kept[SURPLUS]))
    write_state(tmp_path, SavedRun(state, {}, {}, {}, None))
    state = with_records(load_state(tmp_path).state, after)
    later = Routed(run._scores, count=2, state=state, records=after)
    rollout, _ = sample_groups(later, DynamicSampling())
    assert later.prompt_rows[0] == 3 and rollout.record_ids is not None
    experts = after.of_rows(rollout, range(len(rollout))).for_tokens(torch.arange(len(rollout.input_ids))).experts
    assert torch.equal(experts[:, 1, 2].long(), rollout.input_ids + 5)
    plain = with_records(load_state(tmp_path).state, None).kept[SURPLUS]
    assert not {"routed_experts", "record_ids"} & plain.keys()


def test_a_surplus_is_part_of_a_checkpoint(tmp_path: Path) -> None:
    run = Run({0: DEAD, 1: LIVE, 2: LIVE, 3: LIVE}, count=2)
    sample_groups(run, DynamicSampling())
    assert kept(run.state) == (3,)
    write_state(tmp_path, SavedRun(run.state, {}, {}, {}, None))
    loaded = load_state(tmp_path).state
    assert kept(loaded) == (3,) and loaded.kept[SURPLUS].keys() == run.state.kept[SURPLUS].keys()
    for name, tensor in run.state.kept[SURPLUS].items():
        found = loaded.kept[SURPLUS][name]
        assert torch.equal(found, tensor) and found.dtype == tensor.dtype
    assert replace(loaded, kept={}) == replace(run.state, kept={})


# ------------------------------------------------------------------------------------------------ whole runs


def config(directory: Path, **algorithm: Any) -> Path:
    path = write_config(directory / "config.yaml", make_inputs(directory / "inputs"))
    tree = json.loads(path.read_text())
    for name in ("critic", "reference"):
        del tree[name]
    tree["reward"] = {
        "functions": [{"function": "tests.flows.dynamic_rewards:first_is_a_digit"}],
        "overlong": {"buffer": 2},
    }
    tree["data"]["train"] = str(make_uneven_prompts(directory / "uneven.jsonl"))
    tree["sampling"] |= {"samples_per_prompt": 2, "by_prompt_length": BY_PROMPT_LENGTH}
    tree["algorithm"] = {
        "name": "grpo",
        "kl": {"use": "none"},
        "dynamic_sampling": {"max_generation_rounds": 3},
    } | algorithm
    tree["algorithm"]["policy"] = {"loss_mean": "token_mean", "mask_truncated": True, "clip_range_high": 0.28}
    tree["num_iterations"] = 4
    tree["metrics"]["dump_batches"] = True
    path.write_text(json.dumps(tree))
    return path


# of prompts of 4 to 10 tokens
BY_PROMPT_LENGTH = [
    {"up_to": 5, "samples_per_prompt": 3, "temperature": 0.6},
    {"up_to": 8, "samples_per_prompt": 4, "temperature": 1.3, "max_response_length": 5},
]
TEMPERATURES, LIMITS, SIZES = (0.6, 1.3, 1.0), (8, 5, 8), (3, 4, 2)  # of the buckets, and of longer prompts


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        found = list(csv.DictReader(file))
    timed = re.compile("time/|speed/|_ms$|tokens_per_sec|throughput|memory/|idle|seconds")
    return [{name: value for name, value in row.items() if not timed.search(name)} for row in found]


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_run_goes_on_with_its_surplus_bit_for_bit(tmp_path: Path) -> None:
    path = config(tmp_path)
    said = run_ranks(
        2, "hybridflow.train", path, "name=whole", "checkpoint.save_interval=1", "checkpoint.keep_last=9"
    ).stdout
    whole = rows(tmp_path / "whole")
    surplus = [int(float(row["rollout/groups_surplus"])) for row in whole]
    assert any(surplus[:-1]), "the test needs an iteration that leaves some"
    assert all(float(row["rollout/groups_equal"]) >= 0 for row in whole) and "groups generated in" in said
    stop = next(i for i, count in enumerate(surplus) if count) + 1
    run_ranks(2, "hybridflow.train", path, "name=cut", "checkpoint.save_interval=1", f"num_iterations={stop}")
    assert (tmp_path / "cut" / "checkpoints" / f"step_{stop:06d}" / "surplus.safetensors").exists()
    run_ranks(2, "hybridflow.train", path, "name=cut", "checkpoint.save_interval=1")
    assert rows(tmp_path / "cut") == whole
    check_buckets(tmp_path)
    last = "iteration_000004.safetensors"
    one, other = (load_file(tmp_path / name / "batches" / last) for name in ("whole", "cut"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def check_buckets(directory: Path) -> None:
    """Of the first batch, that the weights of the directory gave: sizes, limits, and log-probs by HuggingFace.

    Those are at each row's temperature, as the engine drew from and the trainer has to take.
    """
    batch = load_file(directory / "whole" / "batches" / "iteration_000001.safetensors")
    network = AutoModelForCausalLM.from_pretrained(directory / "inputs" / "policy")
    asked, lengths = batch["prompt_lengths"].tolist(), batch["lengths"].tolist()
    of_row = [0 if n <= 5 else 1 if n <= 8 else 2 for n in asked]
    assert set(of_row) == {0, 1, 2}
    of_group = [SIZES[of_row[row]] for row in (batch["prompt_indices"].diff(prepend=torch.tensor([-1])) > 0).nonzero()]
    assert batch["prompt_indices"].bincount().tolist() == of_group
    pieces = zip(*(batch[x].split(lengths) for x in ("input_ids", "log_probs", "rollout_log_probs")), strict=True)
    for row, (tokens, trainers, engines) in enumerate(pieces):
        start, bucket = asked[row], of_row[row]
        assert len(tokens) - start <= LIMITS[bucket]
        assert bool(batch["truncated"][row]) == (len(tokens) - start == LIMITS[bucket] and int(tokens[-1]) != END)
        with torch.no_grad():
            log_p = (network(tokens[None]).logits[0] / TEMPERATURES[bucket]).log_softmax(-1)
        expected = log_p[:-1].gather(1, tokens[1:, None])[start - 1 :, 0]
        torch.testing.assert_close(trainers[start:], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(engines[start:], expected, atol=1e-5, rtol=1e-5)
    first = rows(directory / "whole")[0]
    found = [int(float(first[f"sampling/{name}/prompts"])) for name in ("up_to_5", "up_to_8", "longer")]
    assert found == [of_row.count(bucket) // SIZES[bucket] for bucket in range(3)]
    assert float(first["rollout/log_prob_diff_max"]) < 1e-4, "of log-probs down to -30: above, each to 1e-5 of it"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"checkpoint": {"save_rollout": True}},
            "algorithm.dynamic_sampling cannot go with checkpoint.save_rollout = true",
        ),
        (
            {"algorithm": {"name": "opo", "policy": {}}},
            "name = opo cannot go with dynamic_sampling.surplus = keep: opo is exactly on-policy",
        ),
    ],
)
def test_what_cannot_go_together_is_refused(changes: dict[str, dict[str, Any]], told: str, tmp_path: Path) -> None:
    tree = json.loads(config(tmp_path).read_text())
    for section, values in changes.items():
        tree[section] = tree.get(section, {}) | values
    (tmp_path / "x.yaml").write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=re.escape(told)):
        ExperimentConfig.from_yaml(tmp_path / "x.yaml")
