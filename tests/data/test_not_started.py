"""Rows that an environment does not begin: passed over when their turn comes, counted, and no end of the run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.environment import EnvironmentConfig
from hybridflow.data.continuations import Continuations
from hybridflow.data.end_tokens import end_of_turn
from hybridflow.data.environment import EnvironmentInputs
from hybridflow.data.prompts import PromptDataset, load_prompts
from hybridflow.data.row_notes import dropped_metrics, left_out_lines
from hybridflow.data.templates import ChatTemplate
from hybridflow.errors import DataError
from hybridflow.rewards.pool import Answer
from tests.data.kinds_of_templates import KINDS, tokenizer_of

TOKENIZER = tokenizer_of(KINDS["roles"])


class GivenStarts:
    """In the pool's place: rows in `gone` do not start, those in `odd` begin with a role that no template knows."""

    def __init__(self, on_error: str) -> None:
        self.config = EnvironmentConfig(**{"class": "a:B", "on_error": on_error})
        self.field, self.gone, self.odd = self.config.field, set[int](), set[int]()

    def first_messages(self, rows: Sequence[Any]) -> list[Answer]:
        return [
            Answer(None, "start raised OSError: gone", 0.0, "")
            if row["n"] in self.gone
            else Answer({"messages": [{"role": self._role(row), "content": f"task {row['n']}"}]}, "", 0.0, "")
            for row in rows
        ]

    def _role(self, row: Any) -> str:
        return "hint" if row["n"] in self.odd else "user"


@pytest.fixture()
def path(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(8)))
    return tmp_path / "rows.jsonl"


def load(path: Path, pool: GivenStarts) -> PromptDataset:
    continues = Continuations.from_template(ChatTemplate(TOKENIZER), (), end_of_turn(TOKENIZER))
    inputs = EnvironmentInputs(pool, continues)
    return load_prompts(
        path,
        TOKENIZER,
        prompt_key="prompt",
        chat_template=True,
        max_length=99,
        overlong="error",
        vocab_size=len(TOKENIZER),
        first_messages=inputs.first_messages,
    )


@pytest.mark.parametrize(("what", "told"), [("gone", "start raised OSError: gone"), ("odd", "of the role 'hint'")])
def test_a_row_that_does_not_start_is_passed_over(what: str, told: str, path: Path) -> None:
    """Its place in the order stays, so that a row which starts later changes no other row's turn."""
    pool = GivenStarts("fail_row")
    getattr(pool, what).update({2, 6})
    prompts = load(path, pool)
    [line] = left_out_lines("data.train", prompts.rows, "too long")
    assert line.startswith("data.train: 2 of 8 rows do not start now") and told in line
    order = prompts.order(0, False)
    drawn = [prompts.draw(order, 4), prompts.draw(order, 4)]
    assert [list(its.numbers) for its in drawn] == [[0, 1, 3, 4], [5, 7, 0, 1]]
    assert [its.batch.columns["n"] for its in drawn] == [(0, 1, 3, 4), (5, 7, 0, 1)]
    dropped = [its.dropped for its in drawn]
    assert dropped_metrics("error", "error", dropped, begins=True) == {"data/dropped_not_started": 2.0}
    assert dropped_metrics("drop", "error", dropped) == {"data/dropped_bad": 0.0}
    assert prompts.all_that_start().columns["n"] == (0, 1, 3, 4, 5, 7)
    getattr(pool, what).clear()
    assert prompts.draw(prompts.order(0, False), 8).numbers == tuple(range(8))


def test_prompts_that_were_drawn_are_there_though_their_rows_start_no_more(path: Path) -> None:
    pool = GivenStarts("fail_row")
    pool.gone = {7}
    prompts = load(path, pool)
    drawn = prompts.draw(prompts.order(0, False), 2)
    pool.gone = set(range(8))
    assert prompts.batch([1, 0]).texts == drawn.batch.texts[::-1]
    with pytest.raises(DataError, match=r"rows\.jsonl, line 4: data\.environment\.class = a:B: start raised OSError"):
        prompts.batch([3])
    with pytest.raises(DataError, match="start raised OSError: gone"):
        prompts.all_that_start()


def test_where_no_row_starts_the_run_ends_and_where_errors_end_it_too(path: Path) -> None:
    for on_error, gone in (("fail_row", set(range(8))), ("end_run", {6})):
        pool = GivenStarts(on_error)
        pool.gone = gone
        with pytest.raises(DataError, match=r"a:B: start raised OSError: gone"):
            load(path, pool)
