"""Published runs: the page's tables are what the script makes; rows that are far off are those that the page names."""

import pytest

from hybridflow.automap.device import load_profile
from tests.bench.published import BEGIN, END, PAGE, cache_gib, own_rows, published_rows, tables
from tests.bench.published_runs import NEMO_RUNS

FACTOR = 1.5
FAR_OFF = {("0.4", "qwen3-30b-a3b"), ("0.4", "qwen3-235b-a22b"), ("0.5", "qwen3-235b-a22b")}
NAMES = {"qwen3-30b-a3b": "30B-A3B", "qwen3-235b-a22b": "235B-A22B"}


@pytest.mark.thorough
def test_the_page_has_the_tables_of_the_script() -> None:
    written = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip()
    assert written == tables(), "python -m tests.bench.published --write"


@pytest.mark.thorough
def test_rows_are_within_a_factor_or_named_on_the_page() -> None:
    rows = published_rows()
    blind = zip(NEMO_RUNS, rows, strict=False)
    far = {(run.version, run.model) for run, row in blind if not 1 / FACTOR <= row.ratio <= FACTOR}
    assert far == FAR_OFF
    page = PAGE.read_text()
    assert all(f"| {NAMES[model]}, {version} |" in page for version, model in far)
    assert len([row for row in rows if row.blind]) == len(NEMO_RUNS) == 11
    assert all(1 / FACTOR <= row.ratio <= FACTOR for row in (*rows[len(NEMO_RUNS) :], *own_rows()))


def test_prompts_are_what_the_rate_leaves_of_the_mean_response() -> None:
    """540 tokens/s x 32 GPUs x 393 s / 2,048 sequences = 3,315.94 tokens, of which 3,206 are the response."""
    run = next(run for run in NEMO_RUNS if (run.version, run.model) == ("0.4", "qwen3-32b"))
    assert run.prompt == pytest.approx(3315.94 - 3206, abs=0.01)
    assert all(80 < run.prompt < 180 for run in NEMO_RUNS)


def test_the_cache_is_what_the_engines_share_leaves() -> None:
    """0.6 x 80 GiB less 8.03 x 2 GB of weights and 3 GiB."""
    assert cache_gib(NEMO_RUNS[0], load_profile("h100-sxm").memory_bytes) == pytest.approx(48 - 14.96 - 3, abs=0.06)
