"""The log of a rank: what is in its file, what is on stderr, and that the file waits for the run directory."""

import logging
import re
from pathlib import Path

import pytest

from hybridflow.errors import ConfigError, EnvironmentProblem, Stopped
from hybridflow.parallel.rank_log import IN_FILES_ALONE, VARIABLE, log_error, open_rank_log, rank_log

LOG = logging.getLogger("hybridflow.somewhere")
TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", re.MULTILINE)


@pytest.fixture(autouse=True)
def third_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv(VARIABLE, raising=False)


def lines_of(text: str) -> list[str]:
    """Without times, and without the first, which tells command and process."""
    assert TIME.search(text)
    return TIME.sub("", text).splitlines()[1:]


def log_all() -> None:
    LOG.debug("a stage")
    LOG.info("shown", extra=IN_FILES_ALONE)
    LOG.info("once")
    logging.getLogger("other.library").info("nothing of interest")
    logging.getLogger("other.library").warning("of a library")


ALL = [
    "rank 2 INFO hybridflow.somewhere: shown",
    "rank 2 INFO hybridflow.somewhere: once",
    "rank 2 WARNING other.library: of a library",
]
STAGE, END = "rank 2 DEBUG hybridflow.somewhere: a stage", "rank 2 INFO hybridflow: finished"


def test_the_file_has_what_happens_and_stderr_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with rank_log(tmp_path / "logs"):
        LOG.info("before the run has its directory")
        assert not (tmp_path / "logs").exists()
        open_rank_log()
        log_all()
    file = tmp_path / "logs" / "rank_2.log"
    assert "rank 2 INFO hybridflow: rank 2 of 4 on " in file.read_text().splitlines()[0]
    early = "rank 2 INFO hybridflow.somewhere: before the run has its directory"
    assert lines_of(file.read_text()) == [early, *ALL, END]
    assert TIME.sub("", capsys.readouterr().err) == f"{ALL[2]}\n"
    LOG.warning("of nobody")
    with rank_log(tmp_path / "logs"):
        open_rank_log()
    assert file.read_text().count(" of 4 on ") == 2 and "nobody" not in file.read_text()


def test_debug_adds_stages_and_tells_all_ranks_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "debug")
    with rank_log(tmp_path):
        open_rank_log()
        log_all()
    assert lines_of((tmp_path / "rank_2.log").read_text()) == [STAGE, *ALL, END]
    assert lines_of(capsys.readouterr().err) == [STAGE, *ALL[1:], END]  # the bar or the lines of rank 0 have the other


def test_an_unknown_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "loud")
    rule = "HYBRIDFLOW_LOG = 'loud': must be debug, info, warning, error"
    with pytest.raises(EnvironmentProblem, match=rule), rank_log(tmp_path):
        pass


def test_an_error_leaves_its_traceback_once_even_before_there_is_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ZeroDivisionError), rank_log(tmp_path / "logs"):
        try:
            _ = 1 / 0
        except ZeroDivisionError as error:
            log_error(error)  # as before a rank waits to learn whether another one is gone
            raise
    text = (tmp_path / "logs" / "rank_2.log").read_text()
    assert text.count("Traceback") == text.count("ZeroDivisionError: division by zero") == 1
    assert capsys.readouterr().err == ""


def test_a_users_error_before_there_is_a_directory_leaves_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError), rank_log(tmp_path / "logs"):
        raise ConfigError("seed = -1: must be at least 0")
    assert list(tmp_path.iterdir()) == []


def test_a_stop_is_no_error(tmp_path: Path) -> None:
    with pytest.raises(Stopped), rank_log(tmp_path):
        open_rank_log()
        raise Stopped("after iteration 3", saved=True)
    assert lines_of((tmp_path / "rank_2.log").read_text()) == ["rank 2 INFO hybridflow: stopped after iteration 3"]


def test_a_directory_that_cannot_be_made_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").write_text("a file")
    with rank_log(tmp_path / "logs"):
        open_rank_log()
        open_rank_log()
        LOG.info("lost")
    told = capsys.readouterr().err
    assert told == f"hybridflow: warning: no log: {tmp_path}/logs/rank_2.log: File exists\n"


def test_a_full_disk_neither_ends_the_run_nor_fills_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank_2.log").symlink_to("/dev/full")
    with rank_log(tmp_path):
        open_rank_log()
        LOG.info("lost")
    assert capsys.readouterr().err == ""
