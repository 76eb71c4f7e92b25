"""What no case has."""

from tests.covering import uncovered

AXES = {"tp": (1, 2), "pp": (1, 2), "sp": (False, True)}


def test_pairs_that_stand_in_no_case_are_found() -> None:
    cases = [
        {"tp": 1, "pp": 1, "sp": False},
        {"tp": 1, "pp": 2, "sp": True},
        {"tp": 2, "pp": 1, "sp": True},
    ]
    assert uncovered(AXES, cases) == {(("tp", 2), ("pp", 2)), (("tp", 2), ("sp", False)), (("pp", 2), ("sp", False))}
    assert uncovered(AXES, [*cases, {"tp": 2, "pp": 2, "sp": False}]) == set()
