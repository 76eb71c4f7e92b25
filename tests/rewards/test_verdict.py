"""The score in what a judge says (`hybridflow/rewards/verdict.py`)."""

import pytest

from hybridflow.rewards.verdict import verdict


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("Both say 4, so I give it 7.5.", 7.5),
        ("I give it 8 out of 10.", 8.0),
        ("Rating: **6**/10", 6.0),
        ("Score: 7,5 / 10", 7.5),
        ("0,125", 0.125),
        ("1e-1", 0.1),
        ("7 (0 worst, 10 best)", 7.0),
        ("Rating: 7\n\n(0 is the worst and 10 is the best)", 7.0),
        ("Score (1-10): 7", 7.0),
        ("I would say 7. The scale goes from 0 to 10.", 7.0),
        ("Rating: 4 (of 5 claims 4 hold)", 4.0),
        ("Score: 6\n\nNote: I used version 2 of the rubric.", 6.0),
        ("7\n\nThe response has 2 flaws and 3 merits.", 7.0),
        ("I'd give this response a 6, as 2 claims of 3 are wrong.", 6.0),
        ("Accuracy score: 6\nOverall score: 5\nStyle score: 3", 5.0),
        ("It deserves a 7 overall.", 7.0),
        ("Score: 8\nConfidence: 90", 8.0),
        ("Its style has the score: 9. But I\n\n4", 4.0),
        ("Rating: [[8]]", 8.0),
        ("<think>It has 2 errors, maybe 4.</think>\nRating: 7", 7.0),
        ("2 or 3?</think>\n4", 4.0),
        ('{"score": 6, "reason": "there are 2 errors"}', 6.0),
        ('```json\n{"rating": "7/10", "why": "3 flaws"}\n```', 7.0),
        ('{"a_score": 3, "b_score": 4, "overall_score": 5}', 5.0),
        ('{"verdict": {"score": 3}, "errors": 2}', 3.0),
        ("{'score': 6, 'reason': '2 errors'}", 6.0),
        ("8 points out of 10", 8.0),
        ("Score: 8\nReason: 5 of 6 hold.", 8.0),
        ("### Response\n8", 8.0),
        ("Score: 8\n- 2 good ideas, of which 1 is new", 8.0),
        ("I give it 7. The maximum score is 10.", 7.0),
        ("2 of 3 hold.\n<overall_score>8</overall_score>\n<reason>1 does not</reason>", 8.0),
        ('{"score": 8, "max_score": 10}', 8.0),
    ],
)
def test_a_judges_score_is_found_by_its_place(says: str, expected: float) -> None:
    assert verdict(says, 0.0, 10.0) == expected


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("", "gives no number"),
        ("Step 2 is wrong.", "gives no number"),
        ("The response has 3 parts. Part 1 is fine. In part 2", "gives no number"),
        ("<think>First I look at step 1, which", "reasoning does not end"),
        ("4/5", "says 4/5; expected one number, not a fraction"),
        ("Score: 7-8", "gives no number"),
        ("7 is too much: of 6 criteria 5 hold here", "gives several numbers"),
        ("The score of its style is 9, of the rest 4.", "gives several numbers"),
        ('{"accuracy": 3, "style": 4}', "gives several numbers: accuracy, style"),
        ("-3", "says -3; expected a number from 0 to 10"),
        ("Score: 50%", "says 50; expected a number from 0 to 10"),
    ],
)
def test_what_is_no_clear_score_is_an_error(says: str, expected: str) -> None:
    with pytest.raises(ValueError, match=f"the judge.?s? {expected}"):
        verdict(says, 0.0, 10.0)


@pytest.mark.thorough
@pytest.mark.parametrize("text", ["[" * 30_000, '{"a":' * 30_000, "score: " * 20_000, "1 " * 20_000, "(" * 30_000])
def test_a_hostile_judge_takes_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="the judge"):
        verdict(f"{text} x", 2.0, 10.0)
