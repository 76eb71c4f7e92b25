"""Where a number that is not finite is said to be."""

import pytest
import torch

from hybridflow.batch import RolloutBatch, response_mask
from hybridflow.flows.step_metrics import NonFinite, check_finite

LENGTHS = torch.tensor([3, 2])
ROLLOUT = RolloutBatch(
    torch.ones(5, dtype=torch.int64),
    LENGTHS,
    torch.tensor([1, 1]),
    torch.tensor([4, 6]),
    torch.zeros(2, dtype=torch.bool),
    response_mask(LENGTHS, torch.tensor([1, 1])),
    torch.zeros(5),
)


@pytest.mark.parametrize(
    ("size", "at", "expected"),
    [
        (5, 3, "log_probs is nan in row 1 (a response to prompt 6 of the iteration)"),
        (2, 0, "log_probs is nan in row 0 (a response to prompt 4 of the iteration)"),
        (4, 1, "log_probs is nan in row 1 (a response to prompt 6 of the iteration)"),
        (4, 3, "log_probs is nan in row 1 of the second rollout"),
    ],
)
def test_the_row_is_named(size: int, at: int, expected: str) -> None:
    """Of tokens, of sequences, and of those of two rollouts together."""
    values = torch.zeros(size)
    check_finite({"values": values}, ROLLOUT)
    values[at] = float("nan")
    with pytest.raises(NonFinite) as raised:
        check_finite({"values": torch.zeros(2), "log_probs": values}, ROLLOUT)
    assert str(raised.value) == expected and raised.value.tensors["log_probs"] is values
