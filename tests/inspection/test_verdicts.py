"""Which link is slow, whose clock is off, and who has another file: by literal numbers."""

import pytest

from hybridflow.inspection.verdicts import (
    LinkFigures,
    clock_finding,
    clock_offset,
    clocks,
    common_end,
    disagreements,
    link_findings,
    slow_links,
)
from tests.messages import like

AB, AC, BC, AD, BD, CD = (("a", "b"), ("a", "c"), ("b", "c"), ("a", "d"), ("b", "d"), ("c", "d"))


@pytest.mark.parametrize(
    ("rates", "slow"),
    [
        ({AB: 1e9}, []),
        ({AB: 12.4e6}, [AB]),  # alone: by the floor
        ({AB: 12.6e6}, []),
        ({AB: 1e9, AC: 1e8}, []),  # one other makes no median
        ({AB: 1e9, AC: 1e9, BC: 2.4e8}, [BC]),  # below a quarter of the others' median
        ({AB: 1e9, AC: 1e9, BC: 2.6e8}, []),
        ({AB: 2e9, AC: 1.2e5, BC: 1.1e5}, [AC, BC]),  # all of one host's
        ({AB: 2e9, AC: 2e9, BC: 2e9, AD: 3e8, BD: 3e8, CD: 3e8}, [AD, BD, CD]),
        ({AB: 1e6, AC: 1e6, BC: 1e6}, [AB, AC, BC]),  # alike, and all of them too slow
    ],
)
def test_slow_links(rates: dict, slow: list) -> None:
    assert list(slow_links(rates)) == slow


def test_a_slow_link_is_compared_with_the_others_or_with_the_floor() -> None:
    assert slow_links({AB: 2e8, AC: 2.4e8, BC: 1.2e5}) == {BC: "the other 2 links: 200 MB/s to 240 MB/s"}
    assert slow_links({AB: 1.2e5}) == {AB: "a link is slow below 12 MB/s"}


def test_the_end_that_slow_links_share() -> None:
    links = [AB, AC, BC, AD, BD, CD]
    assert common_end([AC, BC, CD], links) == "c"
    assert common_end([AC, BC], links) is None  # c - d is well
    assert common_end([AC], links) is None  # one link may be either end's fault


def figures(out: float, back: float) -> LinkFigures:
    return LinkFigures(out, back, latency=65e-6, offset=0.0, num_bytes=1 << 24)


def test_the_message_names_hosts_direction_rate_and_the_others() -> None:
    measured = {("n0", "n1"): figures(2e9, 1.5e9), ("n0", "n2"): figures(1.5e9, 1.2e5), ("n1", "n2"): figures(2e9, 1e5)}
    well, *slow = link_findings(measured, area="links", fails=True, causes="cables")
    assert (well.host, well.value, well.status) == ("n0 - n1", "1,500 MB/s, 65 us", "ok")
    assert [finding.status for finding in slow] == ["fail", "fail"]
    assert (slow[0].host, slow[0].value) == ("n0 - n2", "0.12 MB/s, 65 us")
    assert slow[0].advice == (
        like(
            "slow, from n2 to n0 0.12 MB/s; the other 2 links: 0.1 MB/s to 1,500 MB/s; every slow link is one of n2: "
            "look at cables"
        )
    )
    assert slow[0].figures["bytes_per_second"] == 120_000 and slow[0].figures["bytes_per_second_out"] == 1_500_000_000
    assert [finding.status for finding in link_findings(measured, area="links", fails=False, causes="cables")][1:] == [
        "warn",
        "warn",
    ]


def test_a_clock_offset_as_ntp_has_it() -> None:
    """The other is 5 s ahead; 0.1 s there, 0.2 s of work, 0.3 s back: an error of half the difference of the ways."""
    ahead, trip = clock_offset(sent=100.0, received=105.1, answered=105.3, returned=100.6)
    assert ahead == pytest.approx(4.9) and trip == pytest.approx(0.4)


def test_clocks_are_compared_with_the_median_so_that_a_wrong_first_one_is_found() -> None:
    assert clocks({(0, 1): 3.0, (0, 2): 3.0, (1, 2): 0.0}, 3) == {0: -3.0, 1: 0.0, 2: 0.0}
    assert clocks({(0, 1): 0.5, (1, 2): 2.0}, 3) == {0: -0.5, 1: 0.0, 2: 2.0}  # through another, as on a ring
    assert clocks({(0, 1): 0.0}, 3) == {0: 0.0, 1: 0.0}  # nobody reaches the third
    assert clocks({(0, 2): 1.0, (1, 2): 0.0}, 3) == {0: -1.0, 1: 0.0, 2: 0.0}


def test_a_clock_that_is_off_warns() -> None:
    found = clock_finding("b", -1.25)
    assert (found.status, found.value) == ("warn", "1.250 s behind the median")
    assert "chrony" in found.advice
    assert clock_finding("b", 0.999).status == "ok"


def test_disagreements_name_who_differs_from_most() -> None:
    values = {"a": {"x": "1", "y": "1"}, "b": {"x": "1", "y": "1"}, "c": {"x": "2"}}
    [found] = disagreements("inputs", values, "copy it")
    assert (found.name, found.host, found.value, found.status) == ("x", "c", "2, but a, b have 1", "fail")
    assert disagreements("inputs", {"a": {"x": "1"}, "b": {"x": "1"}}, "copy it") == []
    [found] = disagreements("inputs", {"a": {"x": "1"}, "b": {"x": "2"}}, "copy it")
    assert (found.host, found.value) == ("b", "2, but a has 1")
