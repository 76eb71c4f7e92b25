"""The engine's sampler on a CPU beside vLLM's: the same tokens, log-probs up to rounding, and what stays vLLM's."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.cpu.engine import patches

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("needs_kernels")]
ROWS, VOCABULARY = 6, 300


class LessLikely:
    """A processor as vLLM calls them."""

    def apply(self, logits: Tensor) -> Tensor:
        logits[:, 5] -= 2.0
        return logits


@pytest.fixture(scope="module")
def sampler() -> Any:
    from hybridflow.rollout.patches import prepare_vllm

    prepare_vllm()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.sample.sampler import Sampler

    current_platform.import_kernels()
    with set_current_vllm_config(VllmConfig()):
        yield Sampler(logprobs_mode="processed_logprobs")


def about(**changes: object) -> Any:
    """What vLLM tells its sampler, of requests whose generators have just been made."""
    from vllm.v1.sample.metadata import SamplingMetadata

    fields = dict.fromkeys((field.name for field in dataclasses.fields(SamplingMetadata)), None)
    fields |= {
        "temperature": torch.linspace(0.5, 1.5, ROWS),
        "all_greedy": False,
        "all_random": True,
        "no_penalties": True,
        "max_num_logprobs": 0,
        "generators": {row: torch.Generator().manual_seed(100 + row) for row in range(ROWS)},
        "output_token_ids": [[] for _ in range(ROWS)],
        "bad_words_token_ids": {},
        "logitsprocs": SimpleNamespace(non_argmax_invariant=[], argmax_invariant=[]),
    }
    return SamplingMetadata(**fields | changes)


def logits(seed: int) -> Tensor:
    return torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def by_both(sampler: Any, monkeypatch: pytest.MonkeyPatch, **changes: object) -> tuple[list, list]:
    """Three tokens of each row, one after the other, by our kernel and by vLLM's."""
    found = []
    for ours in (True, False):
        with monkeypatch.context() as patched:
            if not ours:
                patched.setattr(patches, "draw", None)
                patched.setattr(patches, "_draws_from_all", lambda *args: False)
            metadata = about(**changes)
            found.append([sampler.forward(logits(step), metadata) for step in range(3)])
    return found[0], found[1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"allowed_token_ids_mask": torch.arange(VOCABULARY).expand(ROWS, -1) % 3 == 0},
        {"logitsprocs": SimpleNamespace(non_argmax_invariant=[LessLikely()], argmax_invariant=[])},
        {"logitsprocs": SimpleNamespace(non_argmax_invariant=[], argmax_invariant=[LessLikely()])},
    ],
    ids=["plain", "allowed tokens", "processor", "processor after temperature"],
)
def test_tokens_are_vllms(sampler: Any, changes: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = by_both(sampler, monkeypatch, **changes)
    for mine, their in zip(ours, theirs, strict=True):
        assert torch.equal(mine.sampled_token_ids, their.sampled_token_ids)
        assert mine.sampled_token_ids.dtype == their.sampled_token_ids.dtype
        for name in ("logprob_token_ids", "logprobs", "selected_token_ranks"):
            a, b = getattr(mine.logprobs_tensors, name), getattr(their.logprobs_tensors, name)
            assert a.shape == b.shape
            assert torch.allclose(a.double(), b.double(), rtol=0, atol=2e-6)
    assert len({tuple(each.sampled_token_ids.flatten().tolist()) for each in ours}) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("all_random", False),
        ("top_k", torch.full((ROWS,), 5)),
        ("top_p", torch.full((ROWS,), 0.5)),
        ("max_num_logprobs", 2),
        ("max_num_logprobs", None),
        ("generators", {0: torch.Generator()}),
    ],
)
def test_what_else_is_asked_for_stays_vllms(
    sampler: Any, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches, "draw", None)  # would fail
    found = sampler.forward(logits(0), about(**{name: value}))
    assert found.sampled_token_ids.shape == (ROWS, 1)


def test_greedy_tokens_stay_vllms(sampler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "draw", None)
    greedy = about(all_random=False, all_greedy=True, temperature=None, generators={})
    assert sampler.forward(logits(0), greedy).sampled_token_ids[:, 0].tolist() == logits(0).argmax(1).tolist()


def test_a_generator_goes_on_as_vllm_has_it() -> None:
    """One number a token: what is drawn later depends on it."""
    mine, theirs = (torch.Generator().manual_seed(7) for _ in range(2))
    drawn = [patches._seeds({0: mine}).item() for _ in range(5)]
    assert drawn == [torch.randint(0, 2**31, (1,), generator=theirs).item() for _ in range(5)]
