"""The record of a row: tokens with what is known of each, from the engine's calls to tensors and back."""

import math

import torch

from hybridflow.rollout.row import BEGINS, CUT, ENDED, RUNNING, SAMPLED, RolloutRow, Written, rows_of, tensors_of


def test_calls_add_to_a_row() -> None:
    row = RolloutRow([5, 6], [-0.5, -0.25], versions=[3, 3], calls=1)
    assert row.flags == bytearray([SAMPLED] * 2) and row.state == RUNNING
    row.take(RolloutRow([7], [-1.0], versions=[4], state=CUT, calls=1, rewards=(2.0,)))
    assert row == RolloutRow([5, 6, 7], [-0.5, -0.25, -1.0], versions=[3, 3, 4], state=CUT, calls=2, rewards=(2.0,))
    assert row.truncated


def test_others_write_between_turns_and_turns_are_taken_back() -> None:
    written = Written()
    written.add([1, 2], 0)
    written.add([3], 1, [-0.5])
    assert written.flags == bytearray([0, 0, SAMPLED]) and written.log_probs == [0.0, 0.0, -0.5]
    branch = Written([8, 9], [0.0, -2.0], bytearray([0, SAMPLED]), [1, 1])
    written.extend(branch, begins=True)
    assert written.flags == bytearray([0, 0, SAMPLED, BEGINS, SAMPLED]) and written.versions == [0, 0, 1, 1, 1]
    assert branch.flags == bytearray([0, SAMPLED]), "the branch itself is as it was"
    written.cut(2)
    assert written == Written([1, 2], [0.0, 0.0], bytearray([0, 0]), [0, 0])


def test_tensors_give_back_the_rows() -> None:
    rows = [
        RolloutRow([5, 6], [-0.5, 0.0], bytearray([SAMPLED, 0]), [3, 4], state=ENDED, calls=2, rewards=(1.0, 2.0)),
        RolloutRow(),
        RolloutRow([7], [-0.25], versions=[4], state=RUNNING, calls=1, rewards=(0.0, -1.0)),
    ]
    tensors = tensors_of(rows, num_rewards=2)
    assert tensors["rows"].tolist() == [[2, 2, ENDED], [0, 0, RUNNING], [1, 1, RUNNING]]
    assert tensors["token_ids"].tolist() == [5, 6, 7] and tensors["token_ids"].dtype == torch.int32
    assert tensors["flags"].tolist() == [SAMPLED, 0, SAMPLED] and tensors["versions"].tolist() == [3, 4, 4]
    assert tensors["rewards"][[0, 2]].tolist() == [[1.0, 2.0], [0.0, -1.0]]
    assert all(map(math.isnan, tensors["rewards"][1].tolist()))
    assert rows_of(tensors) == rows


def test_without_flags_the_policy_chose_all() -> None:
    tensors = tensors_of([RolloutRow([5, 6], [-0.5, -1.0], state=CUT, calls=1)])
    [row] = rows_of({name: tensors[name] for name in ("rows", "token_ids", "log_probs")})
    assert row == RolloutRow([5, 6], [-0.5, -1.0], state=CUT, calls=1)
