"""Functions in other processes: what they see, how long they may take, and what is left of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridflow.errors import RewardError
from hybridflow.parallel.child_processes import children
from tests.launch import ROOT
from tests.messages import like
from tests.rewards.pools import MISBEHAVING, asked, pool_of, rows, spec

pytestmark = pytest.mark.slow  # waits for processes

EXACT = spec("hybridflow.rewards:exact_match")
MISBEHAVES = spec(f"{MISBEHAVING}:misbehaves", timeout_seconds=2.0)  # a busy machine pauses for 0.5
WHO = spec(f"{MISBEHAVING}:who")


def test_scores_and_errors_come_back() -> None:
    with pool_of(EXACT) as pool:
        outcome = asked(pool, 0, " 4\n", "5", answer=["4", 4])
        assert (outcome.kind, outcome.scores, outcome.problem) == ("scored", ((1.0,), (0.0,)), "")
        assert 0.0 <= outcome.seconds < 30.0
        outcome = asked(pool, 0, "4")
        assert (outcome.kind, outcome.scores) == ("error", ())
        assert outcome.problem == (
            like(
                "reward function hybridflow.rewards:exact_match: row 0: raised KeyError: 'answer'; its prompt "
                "is 'p', the "
                "response '4'"
            )
        )


def test_workers_have_neither_torch_nor_the_trainers_memory() -> None:
    """torch is imported in this process; a worker is no fork of it."""
    assert "torch" in sys.modules
    with pool_of(WHO, num_workers=3) as pool:
        outcomes = [pool.outcome(ticket) for ticket in [pool.submit(0, rows("x")) for _ in range(30)]]
        pids = {int(outcome.scores[0][0]) for outcome in outcomes}
        assert len(pids) == 3 and min(pids) > 0, "negative: torch was there"
        assert pids == set(children(pool.supervisor)) and os.getpid() not in pids
        resident = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4 >> 10 for pid in pids]
        assert max(resident) < 60, "MiB"


def test_a_function_sees_the_same_in_any_process() -> None:
    """Order of sets and random numbers; by another pool too."""
    texts = ["one", "two", "three"]
    found = []
    for num_workers in (1, 3):
        with pool_of(spec(f"{MISBEHAVING}:numbers"), num_workers=num_workers) as pool:
            found += [[asked(pool, 0, text).scores for text in texts] for _ in range(3)]
    assert found == [found[0]] * 6 and len(set(found[0])) == 3


def test_a_row_that_takes_too_long_is_killed_and_the_next_is_scored() -> None:
    with pool_of(MISBEHAVES) as pool:
        started = time.monotonic()
        tickets = [pool.submit(0, rows("r", first=i, how=[how])) for i, how in enumerate(["hang", "well", "deaf hang"])]
        outcomes = [pool.outcome(ticket) for ticket in tickets]
        assert [outcome.kind for outcome in outcomes] == ["timeout", "scored", "timeout"]
        assert outcomes[2].problem == (
            like(
                "reward function tests.rewards.misbehaving:misbehaves: row 2: took longer than "
                "reward.timeout_seconds = "
                "2; its prompt is 'p', the response 'r'"
            )
        )
        assert 2.0 <= outcomes[0].seconds < 10.0 and time.monotonic() - started < 30.0


def test_a_call_of_several_rows_has_the_time_of_each() -> None:
    """1.5 s are over, 3 x 1.5 s are not."""
    slow = spec(f"{MISBEHAVING}:waits_in_all", timeout_seconds=1.5)
    with pool_of(slow) as pool:
        assert asked(pool, 0, "2", "", "").kind == "scored"
        outcome = asked(pool, 0, "10", "")
        assert outcome.kind == "timeout" and "rows 0 to 1: took longer" in outcome.problem
        assert "reward.timeout_seconds = 1.5 for each of 2 rows" in outcome.problem


def test_what_is_not_begun_can_be_withdrawn() -> None:
    with pool_of(spec(f"{MISBEHAVING}:waits_in_all")) as pool:
        asked(pool, 0, "0")
        tickets = [pool.submit(0, rows(seconds)) for seconds in ("2", "0", "0")]
        time.sleep(0.2)
        assert pool.withdraw(tickets[:2]) == {tickets[1]}
        assert [pool.outcome(ticket).kind for ticket in (tickets[0], tickets[2])] == ["scored", "scored"]
        pool.forget([pool.submit(0, rows("0")) for _ in range(3)])
        assert pool._rows == {} and pool._outcomes == {}


@pytest.mark.thorough
def test_coroutines_run_beside_each_other_and_none_is_blamed_for_another() -> None:
    """Of eight at a time, one blocks the event loop, one ends the process, one hangs as it should."""
    with pool_of(spec(f"{MISBEHAVING}:waits", awaited=True, timeout_seconds=2.0)) as pool:
        asked(pool, 0, "r", how=["well"])
        started = time.monotonic()
        tickets = [pool.submit(0, rows("r", how=["well"])) for _ in range(8)]
        outcomes = [pool.outcome(ticket) for ticket in tickets]
        assert [outcome.scores for outcome in outcomes] == [((0.25,),)] * 8
        assert time.monotonic() - started < sum(outcome.seconds for outcome in outcomes)
        ways = ["well", "hang", "well", "deaf hang", "os._exit", "well", "well", "well", "well"]
        outcomes = [pool.outcome(ticket) for ticket in [pool.submit(0, rows("r", how=[how])) for how in ways]]
        wanted = {"well": "scored", "hang": "timeout", "deaf hang": "timeout", "os._exit": "ended"}
        assert [outcome.kind for outcome in outcomes] == [wanted[how] for how in ways]


def test_a_module_that_cannot_be_imported_there_fails_its_own_rows(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "only_here.py").write_text("def f(p, r, c): return [1.0 for _ in p]\n")
    (tmp_path / "deadly.py").write_text("import os\nos._exit(9)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pool_of(spec("only_here:f"), spec("only_here:g")) as pool:
        assert asked(pool, 0, "r").scores == ((1.0,),)
        assert "has no g" in asked(pool, 1, "r").problem
    with pool_of(spec("deadly:f")) as pool:
        for _ in range(2):
            assert "the process that called it ended with exit status 9" in asked(pool, 0, "r").problem


def test_much_text_goes_both_ways() -> None:
    """More than any socket holds, while nothing is collected."""
    text = "x" * (1 << 20)
    with pool_of(spec(f"{MISBEHAVING}:echoes_length")) as pool:
        tickets = [pool.submit(0, rows(text, "\ud800", first=i)) for i in range(20)]
        assert [pool.outcome(ticket).scores for ticket in tickets] == [((1048576.0,), (1.0,))] * 20


def test_the_end_of_a_pool_is_that_of_its_processes() -> None:
    with pool_of(MISBEHAVES, spec(f"{MISBEHAVING}:misbehaves"), num_workers=2) as pool:
        pool.submit(1, rows("r", how=["hang with descendants"]))
        until = time.monotonic() + 30
        while len(below := all_below(pool.supervisor)) < 5:  # two workers, a child of one, two that sleep
            assert time.monotonic() < until, below
            time.sleep(0.05)
    assert [pid for pid in [pool.supervisor, *below] if Path(f"/proc/{pid}").exists()] == []


def test_a_warden_that_is_killed_is_an_error_and_its_workers_end() -> None:
    with pool_of(EXACT) as pool:
        asked(pool, 0, "r", answer=["r"])
        workers = children(pool.supervisor)
        os.kill(pool.supervisor, signal.SIGKILL)
        with pytest.raises(RewardError, match=f"the process {pool.supervisor}, which calls .* has been killed"):
            asked(pool, 0, "r", answer=["r"])
        until = time.monotonic() + 10
        while any(Path(f"/proc/{pid}/exe").exists() for pid in workers):
            assert time.monotonic() < until
            time.sleep(0.01)


def test_signals_to_a_whole_job_end_no_call() -> None:
    """As a scheduler sends them before it takes the machine: the trainer decides when it ends."""
    with pool_of(spec(f"{MISBEHAVING}:waits_in_all")) as pool:
        asked(pool, 0, "0")
        ticket = pool.submit(0, rows("0.5"))
        time.sleep(0.1)
        for pid in [pool.supervisor, *children(pool.supervisor)]:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
                os.kill(pid, number)
        assert pool.outcome(ticket).kind == "scored"


def test_a_pool_is_ready_soon() -> None:
    """Beside a trainer that takes seconds to load: a fifth of one, here with room for a busy machine."""
    started = time.monotonic()
    with pool_of(EXACT, num_workers=2) as pool:
        assert time.monotonic() - started < 3.0, "nothing waits for it"
        asked(pool, 0, "r", answer=["r"])
        assert time.monotonic() - started < 15.0


def test_importing_what_a_worker_imports_loads_no_heavy_package() -> None:
    heavy = {"torch", "numpy", "pydantic", "yaml", "sympy", "httpx"}
    code = (
        f"import hybridflow.rewards.supervisor, sys; assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def all_below(pid: int) -> list[int]:
    return [found for child in children(pid) for found in [child, *all_below(child)]]
