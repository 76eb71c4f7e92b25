"""What the benches count and compare with: shares of operators, operations of a model, lengths of responses."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaForCausalLM

from tests.bench.operators import ENGINE, LAYER, REST, charged, told_apart
from tests.bench.peer_programs.inputs import count_down, llama_config, make_prompts, response_lengths
from tests.bench.peer_programs.report import Work
from tests.bench.peer_programs.workload import END, SIZES, WORKLOADS, Size, prompt_ids


def test_a_layer_of_the_engine_is_told_apart_by_kind() -> None:
    """The second is 10 s long, of which 9 are told, and the rest is the engine's step."""
    events = [("phase:generate", 0, 100), (LAYER, 50, 60), ("aten::mm", 5, 6), (LAYER, 10, 14)]
    layers = [(1.0, 2.0, 0.5), (4.0, 3.0, 2.0)]
    cells = charged(told_apart([(name, start * 1e6, end * 1e6) for name, start, end in events], layers))
    kinds = {kind: seconds for (_, kind, name), seconds in cells.items() if name != "aten::mm"}
    assert kinds == {"products": 5.0, "attention": 5.0, "elementwise": 2.5, ENGINE: 86.5}


def test_every_instant_belongs_to_the_innermost_operator() -> None:
    seconds = [
        ("aten::add", 0, 5),  # before any phase
        ("phase:rollout", 10, 100),
        ("aten::zero_", 11, 13),
        ("phase:generate", 20, 80),
        ("aten::linear", 22, 40),
        ("aten::empty", 23, 25),
        ("kind:vocabulary", 50, 60),
        ("aten::exp", 51, 53),
        ("aten::mm", 54, 57),
        ("autograd::engine", 60, 70),
        ("aten::mul", 62, 65),
    ]
    cells = charged((name, start * 1e6, end * 1e6) for name, start, end in seconds)
    assert {key: round(value) for key, value in cells.items()} == {
        ("rollout", REST, ""): 1 + 7 + 20,
        ("rollout", "elementwise", "aten::zero_"): 2,
        ("generate", ENGINE, ""): 2 + 10 + 7 + 10,
        ("generate", "products", "aten::linear"): 18,
        ("generate", "vocabulary", "kind:vocabulary"): 7,
        ("generate", "products", "aten::mm"): 3,
        ("generate", "elementwise", "aten::mul"): 3,
    }


def test_operations_are_those_that_a_counter_finds() -> None:
    size = Size(hidden=32, ffn=48, layers=3, heads=4, kv_heads=2, head_dim=8, vocab=64)
    model, ids = LlamaForCausalLM(llama_config(size, ends=False)), torch.zeros(5, 16, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids)
    found = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    attention = sum(count for op, count in found.items() if "attention" in op)
    work = Work(size, tokens=80, response_tokens=80, sequences=5)
    # the counter takes all pairs of tokens, of which a causal mask leaves half
    assert work.body + work.head == sum(found.values()) - attention + 4 * 3 * 4 * 8 * 80 * 16 / 2
    assert work.of_phases("ppo")["total"] == (1 + 2 + 3) * (work.body + work.head) + (2 + 3) * work.body


def test_varying_lengths_are_spread_as_the_workload_says(tmp_path) -> None:
    work, file = WORKLOADS["varying"], tmp_path / "prompts.jsonl"
    lengths = response_lengths(work)
    make_prompts(file, work, vocab=4096)
    prompts = prompt_ids(str(file))
    assert (min(lengths), max(lengths)) == (4, 256) and 39 < sum(lengths) / len(lengths) < 41
    assert len(prompts) == len(lengths) and {16 <= len(ids) <= 96 for ids in prompts} == {True}


@pytest.mark.parametrize("name", SIZES)
def test_a_counting_model_ends_where_the_prompt_says(name: str) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(SIZES[name], ends=True)).eval()
    count_down(model)
    ids = torch.tensor([[500, 77, 4000, END + 6]])
    for left in range(5, -1, -1):
        with torch.no_grad():
            probabilities = model(ids).logits[0, -1].softmax(dim=0)
        assert int(probabilities.argmax()) == END + left and float(probabilities.max()) > 1 - 2e-5
        ids = torch.cat([ids, torch.tensor([[END + left]])], dim=1)
