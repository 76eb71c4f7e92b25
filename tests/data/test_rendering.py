"""What the first lines say of how rows become text, what an export records, and where an earlier run did otherwise."""

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridflow.config import ExperimentConfig
from hybridflow.config.data import DataConfig
from hybridflow.config.fixed_data import FixedDataConfig, FixedDataSection
from hybridflow.config.kinds import config_class
from hybridflow.data.examples import Example, load_examples
from hybridflow.data.first_rows import renders
from hybridflow.data.prompts import load_prompts
from hybridflow.data.rendering import earlier_lines, example_rendering, prompt_rendering, write_record
from hybridflow.data.sources import open_files
from hybridflow.data.templates import TemplateOptions
from hybridflow.errors import CheckpointError, DataError
from tests.data.test_chat import CHATML, MARKED
from tests.messages import like
from tests.pages import DOCS, Block, blocks_of

ASKS = [{"role": "user", "content": "2+3?"}]
SAYS = [{"role": "assistant", "content": "5"}]
WRONG = [{"role": "assistant", "content": "6"}]
BRIEF = {"role": "system", "content": "Be brief."}
WITH_MARKS = MARKED.replace("{% endgeneration %}\n", "{% endgeneration %}{{ '\\n' }}")  # jinja drops the line break
THINKS = CHATML.replace("assistant\n{%", "assistant\n{% if enable_thinking is false %}<think></think>{% endif %}{%")


def byte_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A token for each byte, and the tokens of ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = template
    return made


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def loaded(path: Path, kind: Any, **given: Any) -> list[Example]:
    found = load_examples(path, byte_tokenizer(), kind=kind, max_length=2000, vocab_size=300, **given)
    return found.examples(range(len(found)))


# ------------------------------------------------------------------------------------------------ rows of the page

PAGE = DOCS / "guides" / "forms-of-rows.md"
KINDS = {"SFT": "sft", "DPO and reward models": "pairs", "KTO": "labelled", "PPO, GRPO": "prompts"}
KINDS |= {"Environments and agents": "environment", "ShareGPT": "sharegpt"}


def rows_of_page() -> Iterator[tuple[str, Block]]:
    headings = [(i, line[3:]) for i, line in enumerate(PAGE.read_text().splitlines()) if line.startswith("## ")]
    for block in blocks_of(PAGE, "json"):
        yield next(name for i, name in reversed(headings) if i < block.line), block


def of_transformers(prompt: Any, then: Any) -> tuple[list[int], list[bool]]:
    """Token ids, and which count: by transformers alone, of a template with marks."""
    if isinstance(prompt, str):
        before = byte_tokenizer()(prompt)["input_ids"]
        whole = [*byte_tokenizer()(prompt + then)["input_ids"], byte_tokenizer().eos_token_id]
        return whole, [i >= len(before) for i in range(len(whole))]
    how = {"return_dict": True, "return_assistant_tokens_mask": True}
    made = byte_tokenizer(WITH_MARKS).apply_chat_template([*prompt, *then], **how)
    before = byte_tokenizer().apply_chat_template(prompt, return_dict=True)["input_ids"] if prompt else []
    counts = [bool(mask) and i >= len(before) for i, mask in enumerate(made["assistant_masks"])]
    end = max(i for i, count in enumerate(counts) if count) + 1
    return made["input_ids"][:end], counts[:end]


def sequences_of(row: dict[str, Any], kind: str) -> list[tuple[Any, Any]]:
    """(prompt, what follows) of each."""
    if "messages" in row:
        names = {"human": "user", "gpt": "assistant"}
        own = [{"role": names[each["from"]], "content": each["value"]} for each in row["messages"] if "from" in each]
        return [([], own or row["messages"])]
    names = ("chosen", "rejected") if kind == "pairs" else ("completion",)
    if row.get("prompt") is not None:
        return [(row["prompt"], row[name]) for name in names]
    both = row["chosen"], row["rejected"]
    alike = next(i for i, (a, b) in enumerate(zip(*both, strict=False)) if a != b)
    return [(one[:alike], one[alike:]) for one in both]


@pytest.mark.parametrize(("heading", "block"), list(rows_of_page()), ids=lambda each: getattr(each, "place", each))
def test_rows_of_the_page_have_transformers_tokens_without_a_key(heading: str, block: Block, tmp_path: Path) -> None:
    row, kind = json.loads(block.text), KINDS[heading]
    path = write(tmp_path / "a.jsonl", row)
    if kind == "environment":
        assert open_files(path, "data.train").rows_at([0])[0].fields == row
        return
    if kind == "prompts":
        data = DataConfig(train=str(path), prompts_per_iteration=1, max_prompt_length=200)
        given = {"prompt_key": "prompt", "max_length": 200, "overlong": "error", "vocab_size": 300}
        by_template = renders(data, open_files(path, "data.train"))
        prompts = load_prompts(path, byte_tokenizer(), chat_template=by_template, **given).batch([0])
        asked = row["prompt"]
        if by_template:
            asked = byte_tokenizer().apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        assert prompts.input_ids.tolist() == byte_tokenizer()(asked)["input_ids"]
        return
    options = TemplateOptions(form="sharegpt" if kind == "sharegpt" else "openai")
    (example,) = loaded(path, "sft" if kind == "sharegpt" else kind, template=options)
    expected = [of_transformers(*each) for each in sequences_of(row, kind)]
    assert [ids.tolist() for ids in example.sequences] == [ids for ids, _ in expected]
    assert [trained.tolist() for trained in example.trained] == [trained for _, trained in expected]


def test_the_page_has_both_forms_of_every_kind() -> None:
    found = {(KINDS[heading], '"role"' in block.text) for heading, block in rows_of_page()}
    assert found >= {(kind, form) for kind in ("sft", "pairs", "labelled", "prompts") for form in (False, True)}


# ------------------------------------------------------------------------------------------------ the first lines


def rendering(path: Path, kind: Any = "sft", template: str | None = CHATML, **data: Any) -> Any:
    section = FixedDataSection(train=str(path), batch_size=1, max_length=100, **data)
    return example_rendering(section, kind, open_files(path, "data.train"), byte_tokenizer(template))


BY = "rendered by the chat template of the tokenizer"
TEXTS = "columns prompt, completion have texts as they are: the chat template renders lists of messages alone"


@pytest.mark.parametrize(
    ("kind", "rows", "line"),
    [
        ("sft", [{"messages": [*ASKS, *SAYS]}], f"column messages has conversations, {BY}"),
        ("sft", [{"prompt": "a", "completion": "b"}], TEXTS),
        ("sft", [{"prompt": [1], "completion": [2]}], "columns prompt, completion have token ids as they are"),
        (
            "pairs",
            [{"prompt": ASKS, "chosen": SAYS, "rejected": WRONG}],
            f"columns prompt, chosen, rejected have conversations, {BY}",
        ),
        (
            "pairs",
            [{"prompt": "2+3?", "chosen": [*ASKS, *SAYS], "rejected": [*ASKS, *WRONG]}],
            f"columns chosen, rejected have conversations, {BY}",
        ),
        (
            "labelled",
            [{"prompt": "a", "completion": "b"}, {"prompt": ASKS, "completion": SAYS}],
            TEXTS + "; {path}, line 2 has conversations",
        ),
    ],
)
def test_a_line_says_which_columns_are_rendered_and_how(kind: str, rows: Any, line: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *rows)
    assert rendering(path, kind).line == line.format(path=path)
    if line == TEXTS:
        assert rendering(path, kind, template=None).line == TEXTS.partition(":")[0]


def test_a_line_names_the_file_of_the_template_its_arguments_and_columns_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"talk": [*ASKS, *SAYS]})
    byte_tokenizer(THINKS).save_pretrained(tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    arguments = {"columns": {"messages": "talk"}, "chat_template_kwargs": {"enable_thinking": False}}
    section = FixedDataSection(train=str(path), batch_size=1, max_length=100, **arguments)
    assert example_rendering(section, "sft", open_files(path, "data.train"), tokenizer).line == (
        f"column messages (talk) has conversations, rendered by the chat template of {tmp_path}/model/"
        'chat_template.jinja with {"enable_thinking": false}'
    )


def test_a_tokenizer_without_a_template_is_an_error_with_the_file_and_the_key(tmp_path: Path) -> None:
    path, tokenizer = write(tmp_path / "a.jsonl", {"messages": [*ASKS, *SAYS]}), byte_tokenizer(None)
    tokenizer.name_or_path = "base-model"
    with pytest.raises(DataError) as raised:
        load_examples(path, tokenizer, kind="sft", max_length=100, vocab_size=300)
    assert str(raised.value) == like(
        f"{path}, line 1: messages: the tokenizer has no chat template: messages need one. Put the template in "
        "base-model/chat_template.jinja, or give actor.model a model that has a template"
    )


# ------------------------------------------------------------------------------------------------ an earlier run


def test_a_record_has_what_the_first_rows_have_in_common(tmp_path: Path) -> None:
    briefly, off = [BRIEF, *ASKS, *SAYS], {"enable_thinking": False}
    own = {"messages": briefly, "chat_template_kwargs": off}
    known = {"rows": "conversations", "chat_template": THINKS}
    for rows, expected in (
        ([{"messages": briefly}] * 2, {"chat_template_kwargs": {}, "system_prompt": "Be brief."}),
        ([{"messages": briefly}, {"messages": briefly[1:]}], {"chat_template_kwargs": {}}),
        ([own, own], {"chat_template_kwargs": off, "system_prompt": "Be brief."}),
        ([own, {"messages": briefly}], {"system_prompt": "Be brief."}),
    ):
        assert rendering(write(tmp_path / "a.jsonl", *rows), template=THINKS).record == known | expected
    for prompt, record in (("a", {"rows": "texts"}), ([1], {}), ("<|im_start|>user\na", {})):
        path = write(tmp_path / "a.jsonl", {"prompt": prompt, "completion": "b" if isinstance(prompt, str) else [2]})
        assert rendering(path).record == record  # of what was rendered before nothing is known


def grpo(tmp_path: Path, **data: Any) -> ExperimentConfig:
    tree = {
        "name": "grpo",
        "num_iterations": 1,
        "data": {"train": str(tmp_path / "a.jsonl"), "prompts_per_iteration": 1, "max_prompt_length": 9, **data},
        "sampling": {"samples_per_prompt": 2, "max_response_length": 9},
        "actor": {"model": str(tmp_path / "dpo"), "optimizer": {"lr": 1e-6}},
        "reference": {"model": str(tmp_path / "dpo")},
        "reward": {"functions": [{"function": "hybridflow.rewards:exact_match"}]},
        "algorithm": {"name": "grpo"},
    }
    return config_class(tree).from_tree(tree, tmp_path / "config.yaml")


def test_arguments_of_a_row_may_be_dates(tmp_path: Path) -> None:
    """As Parquet has them; a record has their text."""
    file = tmp_path / "rows.parquet"
    day = {"prompt": ASKS, "chat_template_kwargs": {"day": datetime.date(2024, 1, 1)}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([day]), file)
    data = DataConfig(train=str(file), prompts_per_iteration=1, max_prompt_length=100)
    files = open_files(data.train, "data.train")
    found = prompt_rendering(data, files, byte_tokenizer(CHATML + "{{ day }}"), by_template=True)
    assert found.record["chat_template_kwargs"] == {"day": "2024-01-01"} and '{"day": "2024-01-01"}' in str(found.line)
    write_record(tmp_path, found.record)


def test_grpo_after_dpo_says_what_dpo_rendered_otherwise(tmp_path: Path) -> None:
    briefly = {"prompt": [BRIEF, *ASKS], "chosen": SAYS, "rejected": WRONG}
    (tmp_path / "dpo").mkdir()
    dpo = rendering(write(tmp_path / "pairs.jsonl", briefly), "pairs", THINKS).record

    def said(prompt: Any, template: str = THINKS, then: Any = dpo, **data: Any) -> list[str]:
        (tmp_path / "dpo" / "rendering.json").write_text(json.dumps(then))
        config, path = grpo(tmp_path, **data), write(tmp_path / "a.jsonl", {"prompt": prompt, "answer": "5"})
        files = open_files(path, "data.train")
        by_template, tokenizer = renders(config.data, files), byte_tokenizer(template)
        found = prompt_rendering(config.data, files, tokenizer, by_template=by_template)
        return found.lines(config)[1:]

    start = f"warning: actor.model = {tmp_path}/dpo: the run that wrote this model rendered rows otherwise. "
    assert said([BRIEF, *ASKS]) == []
    assert said("2+3?") == [start + "rows: 'conversations' then, 'texts' now"]
    assert said("2+3?", chat_template=True) == [start + "system_prompt: 'Be brief.' then, None now"]
    assert said([BRIEF, *ASKS], chat_template_kwargs={"enable_thinking": False}) == [
        start + "chat_template_kwargs: {} then, {'enable_thinking': False} now"
    ]
    place = THINKS.index("<|im_end|>") - 39
    (line,) = said([BRIEF, *ASKS], THINKS.replace("<|im_end|>", "<eos>"))
    assert line.startswith(start + "chat_template: ") and line.endswith(f" now, from character {place} on")
    assert "<|im_end|>" in line.split(" then, ")[0] and "<eos>" in line.split(" then, ")[1]
    assert said("2+3?", then={}) == said([1, 2]) == []  # of which nothing is known
    (tmp_path / "dpo" / "rendering.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"dpo/rendering.json: is not JSON, remove the file: "):
        earlier_lines(grpo(tmp_path), dpo)


def test_adapters_that_training_begins_with_are_looked_at(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    write_record(adapter, {"rows": "texts"})
    tree = {
        "name": "dpo",
        "num_epochs": 1,
        "data": {"train": "a.jsonl", "batch_size": 1, "max_length": 9},
        "actor": {"model": "base", "optimizer": {"lr": 1e-6}, "lora": {"adapter_path": str(adapter)}},
        "algorithm": {"name": "dpo"},
    }
    config = FixedDataConfig.from_tree(tree, tmp_path / "config.yaml")
    (line,) = earlier_lines(config, {"rows": "conversations"})
    assert line.startswith(f"warning: actor.lora.adapter_path = {adapter}: ")
