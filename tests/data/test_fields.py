"""Columns under other names, and what is said where one is missing."""

import pyarrow
import pyarrow.parquet
import pytest

from hybridflow.data.fields import rename_fields
from hybridflow.data.rows import Row, RowError
from hybridflow.data.sources import open_files

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "why?"}],
    "reward_model": {"style": "rule", "ground_truth": "7"},
    "extra_info": {"index": 3, "split": "train"},
}


def test_names_of_the_config_stand_for_those_of_the_file() -> None:
    row = Row("a, line 1", {"question": "why?", "solution": "7", "level": 2})
    assert rename_fields(row, {"prompt": "question", "answer": "solution"}).fields == {
        "prompt": "why?",
        "answer": "7",
        "level": 2,
    }
    assert rename_fields(row, {}).fields == row.fields


def test_dots_lead_into_nested_fields_which_stay() -> None:
    found = rename_fields(Row("a", VERL), {"answer": "reward_model.ground_truth", "index": "extra_info.index"}).fields
    assert found == VERL | {"answer": "7", "index": 3, "ground_truth": "7"}
    assert rename_fields(Row("a", {"x.y": 1, "x": {"y": 2}}), {"z": "x.y"}).fields == {"x": {"y": 2}, "z": 1}


def test_names_may_be_exchanged() -> None:
    assert rename_fields(
        Row("a", {"chosen": 1, "rejected": 2}), {"chosen": "rejected", "rejected": "chosen"}
    ).fields == {
        "chosen": 2,
        "rejected": 1,
    }


def test_the_ground_truth_of_verl_has_its_name() -> None:
    assert rename_fields(Row("a", VERL), {}).fields == VERL | {"ground_truth": "7"}
    assert rename_fields(Row("a", VERL | {"ground_truth": 8}), {}).fields["ground_truth"] == 8
    assert "ground_truth" not in rename_fields(Row("a", {"reward_model": "text"}), {}).fields


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"prompt": "question"},
            "has no field 'question' (data.columns.prompt); its fields are data_source, prompt, reward_model, "
            "extra_info",
        ),
        (
            {"answer": "reward_model.truth"},
            "has no field 'reward_model.truth' (data.columns.answer); the fields of reward_model are style, "
            "ground_truth",
        ),
        (
            {"answer": "data_source.truth"},
            "has no field 'data_source.truth' (data.columns.answer); data_source is a str",
        ),
        (
            {"prompt": "data_source"},
            "data.columns.prompt = data_source: the row has a field prompt of its own. Set data.columns.prompt=prompt",
        ),
    ],
)
def test_what_is_missing_lists_what_is_there(columns, message) -> None:
    with pytest.raises(RowError) as raised:
        rename_fields(Row("a.parquet, row 3", VERL), columns)
    assert str(raised.value) == f"a.parquet, row 3: {message}"


CALLS = {
    "messages": [
        {"role": "user", "content": "why?", "tool_calls": None},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "text": None}}}],
        },
    ],
    "tools": [{"function": {"name": "add", "parameters": {"a": {"type": "int"}, "text": None}}}],
    "answer": {"left": None},
}


def test_nulls_that_a_format_fills_in_do_not_reach_a_template() -> None:
    """At any depth of messages, tools and arguments; reward functions get what was read."""
    found = rename_fields(Row("a", CALLS, fills_nulls=True), {}).fields
    assert found["messages"] == [
        {"role": "user", "content": "why?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
    ]
    assert found["tools"] == [{"function": {"name": "add", "parameters": {"a": {"type": "int"}}}}]
    assert found["answer"] == {"left": None}


def test_nulls_that_a_person_wrote_stay() -> None:
    assert rename_fields(Row("a", CALLS), {}).fields == CALLS


def test_rows_of_parquet_say_that_their_nulls_are_filled_in(tmp_path) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"tools": [{"a": 1}]}, {"tools": [{"b": 2}]}]), path)
    (first, second) = open_files(path, "data.train").rows_at([0, 1])
    assert first.fields == {"tools": [{"a": 1, "b": None}]}
    assert [rename_fields(row, {}).fields for row in (first, second)] == [{"tools": [{"a": 1}]}, {"tools": [{"b": 2}]}]
