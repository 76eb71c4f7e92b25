"""Vocabulary-parallel log-probs and entropy against torch.log_softmax in float64: values and gradients.

In C, by torch, and by the Triton kernels in Triton's interpreter, which a process takes from its first import on: a
process of its own runs this file's tests so. Tensor parallelism runs in one launch of three ranks, which run this file.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.parallel import vocab, vocab_triton
from hybridflow.parallel.vocab import vocab_kernels
from tests.launch import ROOT, run_ranks
from tests.worlds import world_of_one

ROWS, VOCAB, PADDED = 7, 50, 54  # 54 = 2 x 27 = 3 x 18: with 3 ranks the last holds 14 true columns of 18
TEMPERATURE = 0.7
HUGE = 1e30
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
BY_TRITON = "by_Triton"
BFLOAT16 = 2**-7 if INTERPRETS else 2**-8  # the interpreter cuts off where a GPU rounds to the nearest
WAYS = [BY_TRITON] if INTERPRETS else [pytest.param("in C", marks=pytest.mark.compiles), "by torch"]


@pytest.fixture(scope="module")
def world() -> Iterator[dist.ProcessGroup]:
    """A world of one, unless another test file has left one."""
    with world_of_one() as world:
        yield world


@pytest.fixture(autouse=True, params=WAYS)
def way(request, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == BY_TRITON:
        monkeypatch.setattr(vocab, "uses_cuda", lambda: True)
        monkeypatch.setattr(vocab_triton, "COLUMNS", 16)  # four blocks a row
    elif request.param == "by torch":
        monkeypatch.setattr(vocab, "library", lambda: None)
    else:
        request.getfixturevalue("needs_kernels")


def log_probs_of(*tensors: Tensor, **named: object) -> tuple[Tensor, Tensor]:
    return vocab.vocab_parallel_log_probs(*tensors, **named, kernels=vocab_kernels())


def case(num_rows: int = ROWS, columns: int = PADDED, vocab_size: int = VOCAB) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits whose columns past the vocabulary are huge, targets, and weights of log-probs and entropies in a sum."""
    generator = torch.Generator().manual_seed(3)
    logits = 4.0 * torch.randn(num_rows, columns, generator=generator) + 30.0
    logits[:, vocab_size:] = HUGE
    targets = torch.randint(vocab_size, (num_rows,), generator=generator)
    if num_rows > 2:
        targets[:3] = torch.tensor([0, vocab_size - 1, columns // 2])  # first and last, and one of the second rank
    weights = torch.randn(2, num_rows, generator=generator)
    return logits, targets, *weights


def reference(
    logits: Tensor, targets: Tensor, a: Tensor, b: Tensor, *, vocab_size: int = VOCAB, temperature: float = TEMPERATURE
) -> tuple[Tensor, Tensor, Tensor]:
    """Dense float64: log-probs, entropy, and the gradient of sum a log p + b H for all columns."""
    leaf = logits.detach().double().requires_grad_()
    log_p = torch.log_softmax(leaf[:, :vocab_size] / temperature, dim=1)
    log_probs = log_p.gather(1, targets[:, None]).squeeze(1)
    entropy = torch.distributions.Categorical(logits=log_p).entropy()
    (a.double() * log_probs + b.double() * entropy).sum().backward()
    return log_probs.detach(), entropy.detach(), leaf.grad


def computed(
    logits: Tensor,
    targets: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    group: dist.ProcessGroup,
    vocab_size: int = VOCAB,
    temperature: float | Tensor = TEMPERATURE,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same from this rank's columns, whose gradient is returned."""
    leaf = logits.clone().requires_grad_()
    log_probs, entropy = log_probs_of(
        leaf.clone(), targets, group=group, vocab_size=vocab_size, temperature=temperature
    )
    assert log_probs.dtype == entropy.dtype == torch.float32
    (a * log_probs + b * entropy).sum().backward()
    return log_probs.detach(), entropy.detach(), leaf.grad


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def test_two_equal_logits_by_hand(world: dist.ProcessGroup) -> None:
    # log p = -log 2 and H = log 2; d log p(0) = (1/2, -1/2) / temperature; the entropy stands at its maximum
    logits = torch.tensor([[3.0, 3.0]], requires_grad=True)
    log_probs, entropy = log_probs_of(logits.clone(), torch.tensor([0]), group=world, vocab_size=2, temperature=0.5)
    log_2 = 0.6931471805599453
    assert log_probs.tolist() == pytest.approx([-log_2])
    assert entropy.tolist() == pytest.approx([log_2])
    (log_probs + 5.0 * entropy).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[1.0, -1.0]]))


@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE, 1.5])
def test_values_and_gradients_equal_dense_float64(world: dist.ProcessGroup, temperature: float) -> None:
    inputs = case(columns=VOCAB)
    actual = computed(*inputs, group=world, temperature=temperature)
    for mine, dense in zip(actual, reference(*inputs, temperature=temperature), strict=True):
        assert_near(mine, dense)


def test_each_row_may_have_its_own_temperature(world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients of a row are those that it has alone at its temperature, also over chunks."""
    inputs, temperatures = case(columns=VOCAB), torch.linspace(0.4, 2.0, ROWS)
    dense = [
        torch.cat(parts)
        for parts in zip(
            *(
                reference(*(x[row : row + 1] for x in inputs), temperature=float(temperatures[row]))
                for row in range(ROWS)
            ),
            strict=True,
        )
    ]
    for elements in (vocab.CHUNK_ELEMENTS["cpu"], 2 * VOCAB):
        monkeypatch.setitem(vocab.CHUNK_ELEMENTS, "cpu", elements)
        for mine, expected in zip(computed(*inputs, group=world, temperature=temperatures), dense, strict=True):
            assert_near(mine, expected)
    alike = computed(*inputs, group=world, temperature=torch.full((ROWS,), TEMPERATURE))
    for mine, scalar in zip(alike, computed(*inputs, group=world), strict=True):
        torch.testing.assert_close(mine, scalar, rtol=1e-6, atol=1e-6)


def test_padding_columns_take_no_part(world: dist.ProcessGroup) -> None:
    inputs = case()
    log_probs, entropy, grad = computed(*inputs, group=world)
    dense_log_probs, dense_entropy, dense_grad = reference(*inputs)
    assert_near(log_probs, dense_log_probs)
    assert_near(entropy, dense_entropy)
    assert_near(grad, dense_grad)
    assert (grad[:, VOCAB:] == 0).all()
    assert grad[:, :VOCAB].abs().sum() > 1


@pytest.mark.parametrize("elements", [1, 2 * PADDED, 3 * PADDED + 5])
def test_chunks_do_not_change_the_result(
    world: dist.ProcessGroup, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = case()
    whole = computed(*inputs, group=world)
    monkeypatch.setitem(vocab.CHUNK_ELEMENTS, "cpu", elements)
    chunks = vocab._row_chunks(inputs[0], "cpu")
    assert len(chunks) == {1: 7, 2 * PADDED: 4, 3 * PADDED + 5: 3}[elements]
    for mine, unchunked in zip(computed(*inputs, group=world), whole, strict=True):
        torch.testing.assert_close(mine, unchunked, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("device", "rows"), [("cpu", 7), ("cuda", 458)])
def test_a_chunk_is_as_large_as_the_device_likes(device: str, rows: int) -> None:
    assert vocab.rows_of_chunk(146_304, device) == rows
    assert vocab.rows_of_chunk(1 << 30, device) == 1


def test_bfloat16_logits_lose_only_in_the_rounding_of_the_gradient(world: dist.ProcessGroup) -> None:
    logits, *rest = case()
    inputs = (logits.bfloat16(), *rest)
    log_probs, entropy, grad = computed(*inputs, group=world)
    dense_log_probs, dense_entropy, dense_grad = reference(*inputs)
    assert grad.dtype == torch.bfloat16
    assert_near(log_probs, dense_log_probs)
    assert_near(entropy, dense_entropy)
    torch.testing.assert_close(grad.double(), dense_grad, rtol=BFLOAT16, atol=1e-6)


@pytest.mark.parametrize(("use_log_probs", "use_entropy"), [(True, False), (False, True)])
def test_one_output_alone(world: dist.ProcessGroup, use_log_probs: bool, use_entropy: bool) -> None:
    logits, targets, a, b = case()
    leaf = logits.clone().requires_grad_()
    outputs = log_probs_of(leaf.clone(), targets, group=world, vocab_size=VOCAB, temperature=TEMPERATURE)
    (outputs[0] * a if use_log_probs else outputs[1] * b).sum().backward()
    _, _, dense_grad = reference(logits, targets, a * use_log_probs, b * use_entropy)
    assert_near(leaf.grad, dense_grad)


def test_the_logits_stand_until_backward_and_then_hold_their_gradient(world: dist.ProcessGroup) -> None:
    logits, targets, a, b = case()
    consumed = logits.clone().requires_grad_().clone()
    log_probs, entropy = log_probs_of(consumed, targets, group=world, vocab_size=VOCAB, temperature=TEMPERATURE)
    assert torch.equal(consumed, logits)
    (a * log_probs + b * entropy).sum().backward()
    assert_near(consumed.detach(), reference(logits, targets, a, b)[2])


def test_no_rows(world: dist.ProcessGroup) -> None:
    log_probs, entropy, grad = computed(*case(num_rows=0), group=world)
    assert log_probs.tolist() == entropy.tolist() == []
    assert grad.shape == (0, PADDED)


def test_a_certain_token_has_no_entropy(world: dist.ProcessGroup) -> None:
    logits = torch.tensor([[0.0, 1000.0, -1000.0]], requires_grad=True)
    targets = torch.tensor([1])
    log_probs, entropy = log_probs_of(logits.clone(), targets, group=world, vocab_size=3, temperature=1.0)
    assert log_probs.tolist() == entropy.tolist() == [0.0]
    (log_probs + entropy).sum().backward()
    assert logits.grad.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.distributed
def test_tensor_parallel_two_and_three_equal_dense(tmp_path: Path) -> None:
    done = run_ranks(3, "tests.parallel.test_vocab", tmp_path / "store")
    assert "equal in groups [(0, 1), (0, 1, 2), (1, 2)]" in done.stdout, done.stdout


def run_rank(store: str, rank: int) -> None:
    if INTERPRETS:
        vocab.uses_cuda = lambda: True
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    groups = {ranks: dist.new_group(list(ranks)) for ranks in [(0, 1), (1, 2), (0, 1, 2)]}
    mine = {ranks: group for ranks, group in groups.items() if rank in ranks}
    for group in mine.values():
        for dtype in (torch.float32, torch.bfloat16):
            check_shard(group, dtype, vocab_size=VOCAB)
    # of 54 columns over 3 ranks a vocabulary of 30 leaves the third rank without a true one
    check_shard(groups[0, 1, 2], torch.float32, vocab_size=30)
    dist.barrier()
    dist.destroy_process_group()
    print(f"equal in groups {sorted(mine)}")


def check_shard(group: dist.ProcessGroup, dtype: torch.dtype, *, vocab_size: int) -> None:
    """This rank's columns of one case against the dense result; outputs are whole on every rank."""
    logits, *rest = case(vocab_size=vocab_size)
    logits = logits.to(dtype)
    columns = logits.chunk(group.size(), dim=1)[group.rank()]
    log_probs, entropy, grad = computed(columns, *rest, group=group, vocab_size=vocab_size)
    dense_log_probs, dense_entropy, dense_grad = reference(logits, *rest, vocab_size=vocab_size)
    assert_near(log_probs, dense_log_probs)
    assert_near(entropy, dense_entropy)
    mine = dense_grad.chunk(group.size(), dim=1)[group.rank()]
    assert_near(grad, mine, 1e-5 if dtype == torch.float32 else BFLOAT16)


# ------------------------------------------------------------------------------------------ Triton's kernels

needs_triton = pytest.mark.skipif(not vocab_triton.HAS_TRITON, reason="triton is not installed")
ALONE = pytest.mark.parametrize("way", ["by torch"], indirect=True)


@pytest.mark.thorough
@needs_triton
@ALONE
@pytest.mark.distributed
def test_the_triton_kernels_pass_these_tests_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider", "-k", BY_TRITON]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\n2\d passed", done.stdout) and "skipped" not in done.stdout, done.stdout


@ALONE
def test_a_gpu_takes_the_triton_kernels_where_triton_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocab, "uses_cuda", lambda: True)
    monkeypatch.setattr(vocab_triton, "HAS_TRITON", True)
    assert vocab_kernels() is vocab.BY_TRITON
    monkeypatch.setattr(vocab_triton, "HAS_TRITON", False)
    sums, _ = vocab_kernels()
    assert sums.args == ("cuda",) and sums.func is vocab._partial_sums


def test_float32_is_within_a_millionth_of_float64(way: None, world: dist.ProcessGroup) -> None:
    """A vocabulary of 30,001 near zero: log-probs of about -10, entropies of about 10."""
    generator = torch.Generator().manual_seed(5)
    logits, targets = torch.randn(4, 30_008, generator=generator), torch.tensor([0, 30_000, 17, 4096])
    inputs = (logits, targets, torch.ones(4), torch.full((4,), 0.1))
    found, exact = computed(*inputs, group=world, vocab_size=30_001), reference(*inputs, vocab_size=30_001)
    for mine, dense in zip(found[:2], exact[:2], strict=True):
        torch.testing.assert_close(mine.double(), dense, rtol=1e-6, atol=0)
    torch.testing.assert_close(found[2].double(), exact[2], rtol=1e-5, atol=1e-9)


def test_the_same_inputs_give_the_same_bits(world: dist.ProcessGroup) -> None:
    first, second = (computed(*case(), group=world) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@needs_triton
@ALONE
@pytest.mark.parametrize("element", ["bf16", "fp32"])
def test_the_kernels_compile_to_wide_accesses_of_each_logit_once(element: str, tmp_path: Path) -> None:
    """For an H100, of which there need be none: 16 logits a thread, 16 bytes an access, no second read, no spills."""
    from tests.reshard.test_kernel import compiled, has_tool, resources

    of_rows = dict(targets="*i64", divisors="*fp32")
    sums = dict(logits=f"*{element}", **of_rows, peak="*fp32", sums="*fp32", rows="i32", columns="i32", stride="i32")
    names = ("normalizer", "entropy", "grad_log_probs", "grad_entropy")
    backward = dict(logits=f"*{element}", **of_rows) | dict.fromkeys(names, "*fp32")
    backward |= dict(columns="i32", all_columns="i32", stride="i32")
    accesses = 16 * int(element[-2:]) // 128
    for kernel, arguments, stores in (
        (vocab_triton.sums_kernel, sums, 0),
        (vocab_triton.gradients_kernel, backward, accesses),
    ):
        aligned = tuple(name for name in arguments if name != "rows")
        built = compiled(kernel, arguments, {"COLUMNS": 4096}, multiples_of_16=aligned, warps=vocab_triton.WARPS)
        made = built.asm["ptx"]
        assert len(re.findall(r"ld\.global\S*\.v4\.b32", made)) == accesses, made
        assert len(re.findall(r"st\.global\S*\.v4\.b32", made)) == stores
        assert "atom" not in made and "red.global" not in made
        if has_tool("cuobjdump"):
            used = resources(built.asm["cubin"], tmp_path)
            assert used["LOCAL"] == 0 and used["STACK"] <= 8 and used["REG"] <= 128, used  # 8: by Triton 3.7.1's ptxas
        assert not stores or element == "fp32" or re.search(r"cvt\.rn\.(satfinite\.)?bf16", made)


if __name__ == "__main__":
    run_rank(sys.argv[1], int(os.environ["RANK"]))
