"""Forward, loss and backward of each algorithm's micro-batches on a device for which the host must not wait."""

import json
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from hybridflow.algorithms.policy_loss import sequence_ratio
from hybridflow.batch import to_device_async
from hybridflow.config.algorithms import ALGORITHMS
from hybridflow.config.fixed_algorithms import FIXED_ALGORITHMS
from hybridflow.config.losses import Importance, PolicyKind
from tests.distributed import fixed_cases
from tests.distributed.cases import NUM_LAYERS
from tests.launch import run_ranks
from tests.roles.host_waits import DEVICE, HostWait, NoHostWaits
from tests.roles.host_waits_worker import ONLINE
from tests.tiny_models import make_checkpoints

CASES = [*ONLINE, *fixed_cases.ALGORITHMS]
WAITS: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda x: float(x.sum()),
    "a truth": lambda x: bool((x > 0).all()),
    "a list": lambda x: x.tolist(),
    "unique": lambda x: x.unique(),
    "nonzero": lambda x: x.nonzero(),
    "a boolean index": lambda x: x[x > 0],
    "a mask that is written to": lambda x: x.index_put((x > 0,), torch.ones(3, device=DEVICE)),
    "a copy to the host": lambda x: x.cpu(),
    "a copy into the host's memory": lambda x: torch.zeros(3).copy_(x),
    "a copy from pageable memory": lambda x: x + torch.ones(3).to(DEVICE, non_blocking=True),
    "a copy that is waited for": lambda x: x + torch.ones(3).pin_memory().to(DEVICE),
    "numbers of Python": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=DEVICE),
    "an index on the host": lambda x: x[torch.tensor([0, 1])],
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_is_an_error(wait: str) -> None:
    x = torch.ones(3, device=DEVICE)
    with pytest.raises((HostWait, NotImplementedError, RuntimeError)), NoHostWaits():
        WAITS[wait](x)


def test_what_waits_for_nothing_is_counted() -> None:
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    numbers = torch.tensor([4, 4, 2])
    with NoHostWaits() as mode:
        loss = sequence_ratio(x, torch.zeros_like(x), to_device_async(numbers, DEVICE)).sum()
        loss.backward()
    assert x.grad is not None and x.grad.shape == (3,) and mode.operations > 20


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("waits")
    make_checkpoints(root / "models", family="llama", tied=False, num_layers=NUM_LAYERS, num_kv_heads=4)
    run_ranks(1, "tests.roles.host_waits_worker", root / "models", root / "found.json")
    return json.loads((root / "found.json").read_text())


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_no_micro_batch_makes_the_host_wait(found: dict, name: str) -> None:
    assert found[name]["waits"] == []
    updates = sum(count for call, count in found[name]["calls"].items() if call.endswith((".update", ".step")))
    assert updates >= 1 and found[name]["operations"] > 1000 * updates


def test_every_algorithm_and_loss_is_there() -> None:
    """An algorithm of a user's own is not known."""
    online = [section for section, _ in ONLINE.values()]
    fixed = [trained.section for trained in fixed_cases.ALGORITHMS.values()]
    assert {section["name"] for section in online} == set(ALGORITHMS) - {"custom"}
    assert {section["name"] for section in fixed} == set(FIXED_ALGORITHMS)
    policies = [section.get("policy", {}) for section in online]
    kinds = {ALGORITHMS[section["name"]].model_validate(section).policy.kind for section in online}
    assert kinds == set(get_args(PolicyKind))
    weights = {policy["importance"].get("kind", "token") for policy in policies if "importance" in policy}
    assert weights == set(get_args(Importance.model_fields["kind"].annotation))
