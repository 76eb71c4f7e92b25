from dataclasses import FrozenInstanceError

import pytest
import torch

from hybridflow.algorithms.rewards import (
    RunningMoments,
    batch_normalized,
    clip_scores,
    overlong_penalties,
    penalize_truncated,
    token_rewards,
)

LENGTHS = torch.tensor([4, 2, 3])
MASK = torch.tensor([0, 0, 1, 1, 1, 1, 0, 0, 1], dtype=torch.bool)
KL = torch.tensor([0.0, 0.0, 1.0, -2.0, 0.5, 3.0, 0.0, 0.0, 4.0])
SCORES = torch.tensor([10.0, -1.0, 0.25])


def test_token_rewards_by_hand():
    rewards = token_rewards(SCORES, KL, MASK, lengths=LENGTHS, kl_coef=0.5)
    assert rewards.tolist() == [0.0, 0.0, -0.5, 11.0, -0.25, -2.5, 0.0, 0.0, -1.75]


def test_the_score_lies_on_the_last_response_token_and_gaps_earn_nothing():
    """A gap, a tail, and a sequence without a response token, whose score nobody earns."""
    mask = torch.tensor([0, 1, 0, 1, 0, 1, 0, 0, 0], dtype=torch.bool)
    rewards = token_rewards(SCORES, KL, mask, lengths=LENGTHS, kl_coef=0.5)
    assert rewards.tolist() == [0.0, 0.0, 0.0, 11.0, 0.0, -2.5, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("coef", [0.0, 0.1])
def test_token_rewards_do_not_read_outside_the_response(coef):
    mask, lengths = torch.tensor([False, True, False, True, False]), torch.tensor([5])
    kl = torch.tensor([float("nan"), 1.0, float("inf"), 2.0, float("nan")])
    rewards = token_rewards(torch.tensor([3.0]), kl, mask, lengths=lengths, kl_coef=coef)
    torch.testing.assert_close(rewards, torch.tensor([0.0, -coef, 0.0, 3.0 - 2 * coef, 0.0]))


def test_without_coefficient_only_the_last_token_is_rewarded():
    rewards = token_rewards(SCORES, KL, MASK, lengths=LENGTHS, kl_coef=0.0)
    assert rewards.tolist() == [0.0, 0.0, 0.0, 10.0, 0.0, -1.0, 0.0, 0.0, 0.25]


def test_rewards_of_a_sequence_sum_to_its_score_minus_its_penalty():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 30, (20,), generator=generator)
    mask = torch.cat([torch.arange(n) >= n // 2 for n in lengths.tolist()])
    kl, scores = torch.randn(mask.shape[0], generator=generator), torch.randn(20, generator=generator)
    rewards = token_rewards(scores, kl, mask, lengths=lengths, kl_coef=0.1)
    rows, kl_rows = rewards.split(lengths.tolist()), kl.split(lengths.tolist())
    for score, row, row_kl in zip(scores, rows, kl_rows, strict=True):
        response_kl = row_kl[len(row) // 2 :]
        torch.testing.assert_close(row.sum(), score - 0.1 * response_kl.sum())
        torch.testing.assert_close(row[-1], score - 0.1 * row_kl[-1])
        assert (row[: len(row) // 2] == 0).all()


def test_token_rewards_follow_permuted_sequences_and_do_not_read_the_prompt():
    expected = token_rewards(SCORES, KL, MASK, lengths=LENGTHS, kl_coef=0.5)
    order, tokens = torch.tensor([2, 0, 1]), torch.tensor([6, 7, 8, 0, 1, 2, 3, 4, 5])
    options = {"lengths": LENGTHS[order], "kl_coef": 0.5}
    assert torch.equal(token_rewards(SCORES[order], KL[tokens], MASK[tokens], **options), expected[tokens])
    filled = KL.masked_fill(~MASK, float("nan"))
    assert torch.equal(token_rewards(SCORES, filled, MASK, lengths=LENGTHS, kl_coef=0.5), expected)


def test_token_rewards_leave_their_inputs_as_they_were():
    kl, scores = KL.clone(), SCORES.clone()
    token_rewards(scores, kl, MASK, lengths=LENGTHS, kl_coef=0.5)
    assert torch.equal(kl, KL) and torch.equal(scores, SCORES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kl": torch.zeros(3, 3)}, r"^kl .*one dimension"),
        ({"response_mask": MASK[:5]}, r"^response_mask .*as long as kl"),
        ({"response_mask": MASK.float()}, r"^response_mask .*boolean"),
        ({"scores": torch.zeros(9)}, r"^scores .*as long as lengths"),
        ({"scores": torch.zeros(3, 1)}, r"^scores .*one dimension"),
        ({"lengths": LENGTHS.int()}, r"^lengths .*int64"),
        ({"lengths": LENGTHS + 1}, r"^lengths .*sum to the number of tokens, 9, not 12"),
    ],
)
def test_token_rewards_reject(change, message):
    inputs = {"scores": SCORES, "kl": KL, "response_mask": MASK, "lengths": LENGTHS} | change
    with pytest.raises(ValueError, match=message):
        token_rewards(**inputs, kl_coef=0.1)


def test_clip_scores_by_hand():
    scores = torch.tensor([-7.0, -2.0, 0.5, 2.0, 9.0])
    assert clip_scores(scores, 2.0).tolist() == [-2.0, -2.0, 0.5, 2.0, 2.0]
    assert torch.equal(clip_scores(scores, 9.0), scores)


def test_penalize_truncated_by_hand():
    truncated = torch.tensor([True, False, True])
    assert penalize_truncated(SCORES, truncated, penalty=0.5).tolist() == [9.5, -1.0, -0.25]
    assert torch.equal(penalize_truncated(SCORES, ~truncated & truncated, penalty=0.5), SCORES)


def test_overlong_penalties_by_hand():
    """A limit of 20 with a buffer of 8: nothing up to 12, then an eighth a token, all of it from 20 on."""
    lengths = torch.tensor([0, 12, 13, 16, 20, 25])
    options = {"max_response_length": torch.full((6,), 20), "factor": 2.0}
    assert overlong_penalties(lengths, buffer=8, **options).tolist() == [0.0, 0.0, 0.25, 1.0, 2.0, 2.0]
    loops = [2.0 * min(max(n - 5, 0), 15) / 15 for n in range(30)]
    limits = torch.full((30,), 20)
    found = overlong_penalties(torch.arange(30), max_response_length=limits, buffer=15, factor=2.0)
    torch.testing.assert_close(found, torch.tensor(loops))
    for buffer in (0, 21):
        with pytest.raises(ValueError, match=rf"^buffer is {buffer}: it must be in 1 .. max_response_length, 20"):
            overlong_penalties(lengths, buffer=buffer, **options)
    own = overlong_penalties(  # each from the limit that it was generated under
        torch.tensor([6, 7, 8, 8, 16]), max_response_length=torch.tensor([8, 8, 8, 16, 16]), buffer=4, factor=1.0
    )
    assert own.tolist() == [0.5, 0.75, 1.0, 0.0, 1.0]


def test_batch_normalized_by_hand():
    # mean 3, unbiased variance (4 + 0 + 4) / 2 = 4
    normalized = batch_normalized(torch.tensor([1.0, 3.0, 5.0]))
    torch.testing.assert_close(normalized, torch.tensor([-1.0, 0.0, 1.0]))


def test_batch_normalized_is_the_standard_score_and_ignores_shift_and_scale():
    scores = torch.randn(64, generator=torch.Generator().manual_seed(1))
    expected = (scores - scores.mean()) / scores.std()
    torch.testing.assert_close(batch_normalized(scores), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch_normalized(3.0 * scores + 50.0), expected, rtol=1e-4, atol=1e-4)


def test_batch_normalized_of_equal_scores_or_of_one_score_is_zero():
    assert batch_normalized(torch.full((7,), 1000.1)).tolist() == [0.0] * 7
    assert batch_normalized(torch.tensor([4.0])).tolist() == [0.0]


def test_running_moments_by_hand():
    first = RunningMoments().updated(torch.tensor([1.0, 3.0]))
    assert first == RunningMoments(count=2.0, mean=2.0, m2=2.0)
    second = first.updated(torch.tensor([5.0, 7.0]))  # 1, 3, 5, 7: mean 4, squares 9 + 1 + 1 + 9
    assert second == RunningMoments(count=4.0, mean=4.0, m2=20.0)
    assert second.std == pytest.approx((20 / 3) ** 0.5, rel=1e-12)
    assert first == RunningMoments(count=2.0, mean=2.0, m2=2.0)
    assert {type(second.count), type(second.mean), type(second.m2)} == {float}


def test_running_moments_are_those_of_everything_seen():
    generator = torch.Generator().manual_seed(2)
    batches = [1e3 + torch.randn(n, dtype=torch.float64, generator=generator) for n in (1, 5, 64, 2, 300)]
    moments = RunningMoments()
    for batch in batches:
        moments = moments.updated(batch)
    seen = torch.cat(batches)
    assert moments.count == 372.0
    assert moments.mean == pytest.approx(float(seen.mean()), rel=1e-12)
    assert moments.std == pytest.approx(float(seen.std()), rel=1e-9)
    assert RunningMoments().updated(seen).m2 == pytest.approx(moments.m2, rel=1e-9)


def test_running_normalized_by_hand_and_after_one_batch_equal_to_batch_normalized():
    moments = RunningMoments(count=3.0, mean=2.0, m2=32.0)  # std 4
    torch.testing.assert_close(moments.normalized(torch.tensor([2.0, 10.0])), torch.tensor([0.0, 2.0]))
    scores = torch.randn(32, generator=torch.Generator().manual_seed(3))
    after_one = RunningMoments().updated(scores)
    torch.testing.assert_close(after_one.normalized(scores), batch_normalized(scores))
    one = torch.tensor([4.5])
    assert RunningMoments().updated(one).normalized(one).tolist() == [0.0]


def test_running_moments_are_frozen():
    with pytest.raises(FrozenInstanceError):
        RunningMoments().mean = 1.0


def test_score_functions_check_shapes():
    table, nothing = torch.zeros(2, 2), torch.zeros(0)
    moments = RunningMoments(count=2.0, mean=0.0, m2=1.0)
    for function in (lambda s: clip_scores(s, 1.0), batch_normalized, moments.updated, moments.normalized):
        with pytest.raises(ValueError, match=r"^scores .*one dimension"):
            function(table)
    for function in (batch_normalized, moments.updated):
        with pytest.raises(ValueError, match=r"^scores .*at least one element"):
            function(nothing)
    with pytest.raises(ValueError, match=r"^truncated .*as long as scores"):
        penalize_truncated(SCORES, torch.ones(2, dtype=torch.bool), penalty=1.0)
    with pytest.raises(ValueError, match=r"^truncated .*boolean"):
        penalize_truncated(SCORES, torch.ones(3), penalty=1.0)
    with pytest.raises(ValueError, match=r"^count is 0.0: update"):
        RunningMoments().normalized(SCORES)
