"""Unlike ranks are found and named: by values, and on two ranks."""

import hashlib
import json
import re
import shutil
import zlib
from importlib import metadata
from pathlib import Path

import pytest
import torch

from hybridflow.parallel.agreement import (
    CHECKED_BYTES,
    code_digests,
    differences,
    digest_bytes,
    digest_files,
    digest_tensors,
)
from hybridflow.parallel.versions import public
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.launch import run_ranks
from tests.tiny_models import make_prompts, make_tokenizer

A, B, C = b"\x00" * 16, b"\xff" * 16, b"\x80" + b"\x00" * 15


# ------------------------------------------------------------------------------------------------ who differs


def of(*values: bytes | None) -> dict[int, dict[str, bytes]]:
    """One name on ranks 0, 1, ...; None where a rank does not have it."""
    return {rank: {} if value is None else {"data.train": value} for rank, value in enumerate(values)}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((A, A, B, B, A), f"ranks 2-3 have {B.hex()}, but ranks 0-1,4 have {A.hex()}"),
        ((B, A, A), f"rank 0 has {B.hex()}, but ranks 1-2 have {A.hex()}"),
        ((A, B), f"rank 1 has {B.hex()}, but rank 0 has {A.hex()}"),
        ((B, B, A, A), f"ranks 2-3 have {A.hex()}, but ranks 0-1 have {B.hex()}"),
        ((A, B, A, C), f"rank 1 has {B.hex()}, rank 3 has {C.hex()}, but ranks 0,2 have {A.hex()}"),
        ((A, None, A), f"rank 1 has none, but ranks 0,2 have {A.hex()}"),
        ((None, A, None), f"rank 1 has {A.hex()}, but ranks 0,2 have none"),
        ((b"2.13.0+cpu", b"2.13.0", b"2.13.0"), "rank 0 has 2.13.0+cpu, but ranks 1-2 have 2.13.0"),
    ],
)
def test_those_who_differ_from_most_are_named(values: tuple[bytes | None, ...], expected: str) -> None:
    assert differences(of(*values)) == [f"data.train differs between ranks: {expected}"]


def test_only_what_differs_is_named_in_any_order_of_names() -> None:
    found = differences({4: {"config": A, "x": A, "code": B}, 9: {"code": C, "config": A, "x": A, "y": A}})
    assert found == [
        f"code differs between ranks: rank 9 has {C.hex()}, but rank 4 has {B.hex()}",
        f"y differs between ranks: rank 9 has {A.hex()}, but rank 4 has none",
    ]
    assert differences({0: {"x": A, "y": B}, 1: {"y": B, "x": A}}) == []


# ------------------------------------------------------------------------------------------------ digests


def test_pieces_are_told_apart() -> None:
    assert len({digest_bytes(*pieces) for pieces in ([], [b""], [b"", b""], [b"ab"], [b"a", b"b"], [b"b", b"a"])}) == 6
    assert digest_bytes(b"a") == digest_bytes(b"a")
    assert len(digest_bytes(b"a")) == 16


def test_names_of_files_count_and_their_directory_does_not(tmp_path: Path) -> None:
    for name in ("one/a", "two/a", "two/b"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("same")
    one, two, renamed = (
        digest_files([tmp_path / name], (tmp_path / name).parent) for name in ("one/a", "two/a", "two/b")
    )
    assert one == two != renamed


ROWS = torch.tensor([[0.0, 1.0], [2.0, 3.0]])


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.tensor([[0.0, 1.0], [2.0, 4.0]])},
        {"x": torch.tensor([[-0.0, 1.0], [2.0, 3.0]])},  # equal as numbers
        {"x": ROWS.T},  # the same memory
        {"x": ROWS.reshape(4)},
        {"x": ROWS.view(torch.int32)},
        {"y": ROWS},
        {"x": ROWS, "y": torch.zeros(0)},
        {},
    ],
)
def test_every_bit_dtype_shape_and_name_of_tensors_counts(other: dict[str, torch.Tensor]) -> None:
    assert digest_tensors(other) != digest_tensors({"x": ROWS})


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int64, torch.int32, torch.uint8, torch.float32, torch.bfloat16, torch.float64]
)
def test_a_digest_of_tensors_is_of_their_values(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    scattered = torch.zeros(4, 6, dtype=dtype)[1:3, ::2].copy_(x)
    assert not scattered.is_contiguous()
    assert digest_tensors({"x": scattered, "n": x[0, 0]}) == digest_tensors({"n": x[0, 0].clone(), "x": x})
    expected = hashlib.blake2b(f"x {dtype} (2, 3)\n".encode(), digest_size=16)
    expected.update(zlib.crc32(x.view(torch.uint8).numpy().tobytes()).to_bytes(4, "little"))
    assert digest_tensors({"x": x}) == expected.digest()


def test_every_piece_of_a_large_tensor_counts() -> None:
    x = torch.zeros(3 * CHECKED_BYTES + 5, dtype=torch.uint8)
    found = {digest_tensors({"x": x})}
    for place in (0, CHECKED_BYTES - 1, CHECKED_BYTES, 2 * CHECKED_BYTES + 7, len(x) - 1):
        other = x.clone()
        other[place] = 1
        found.add(digest_tensors({"x": other}))
    assert len(found) == 6


def test_a_not_a_number_is_like_itself() -> None:
    x = torch.tensor([float("nan")])
    assert digest_tensors({"x": x}) == digest_tensors({"x": x.clone()})


def test_the_code_has_the_versions_it_computes_with() -> None:
    found = code_digests()
    assert list(found) == [
        "hybridflow's code",
        *(f"the version of {name}" for name in ("torch", "megatron-core", "vllm", "transformers")),
    ]
    # a build for CUDA calls itself 2.13.0 where it is installed, and 2.13.0+cu130 where it is imported
    assert found["the version of torch"].decode() == metadata.version("torch")
    assert public(metadata.version("torch")) == public(torch.__version__)
    assert b"none" not in found.values()


# ------------------------------------------------------------------------------------------------ on two ranks


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What both ranks were told, by the name of a check."""
    root = tmp_path_factory.mktemp("agreement")
    inputs = make_inputs(root / "inputs")
    write_config(root / "config.yaml", inputs)
    for rank in range(2):
        here = root / str(rank)
        here.mkdir()
        make_prompts(here / "same.jsonl", 4)
        make_prompts(here / "other.jsonl", 4, seed=rank)
        (here / "rank_rewards.py").write_text(f"def f(*_):\n    return [{rank}]\n")
        policy = shutil.copytree(inputs / "policy", here / "changed")
        tokenizer = make_tokenizer()
        tokenizer.chat_template = f"{rank}"  # the same tokens: other ones are refused on the rank that has them
        tokenizer.save_pretrained(policy)
        described = json.loads((policy / "config.json").read_text())
        (policy / "config.json").write_text(json.dumps(described | {"rms_norm_eps": 1e-5 * (1 + rank)}))
    run_ranks(2, "tests.parallel.agreement_worker", root, root)
    first, second = (json.loads((root / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second, "all ranks raise the same"
    return first


TWO = r"rank 1 has [0-9a-f]{32}, but rank 0 has [0-9a-f]{32}"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("check", "names"),
    [
        ("alike", None),
        ("prompts", ["data.train"]),
        ("config", ["the config"]),
        ("tokenizer and model", ["the tokenizer of actor.model", "config.json of actor.model"]),
        ("function", ["the file of rank_rewards"]),
        ("batch alike", None),
        ("batch", ["the batch of iteration 3"]),
        ("other names", ["the batch of iteration 3"]),
        ("trainer", ["data.train"]),
    ],
)
def test_two_ranks(heard: dict[str, str], check: str, names: list[str] | None) -> None:
    if names is None:
        assert heard[check] == "alike"
        return
    lines = heard[check].split("; ")
    assert [line.partition(" differs between ranks: ")[0] for line in lines] == names
    for line in lines:
        assert re.fullmatch(TWO, line.partition(" ranks: ")[2]), line


@pytest.mark.distributed
def test_a_rank_that_alone_has_held_out_prompts(heard: dict[str, str]) -> None:
    config, heldout = heard["heldout on one"].split("; ")
    assert config.startswith("the config differs between ranks: rank 1 has ")
    assert heldout.startswith("data.heldout differs between ranks: rank 1 has ")
    assert heldout.endswith(", but rank 0 has none")
