"""tools.make_tiny: the task by itself, then what a scaled-down run leaves on disk."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tools import make_tiny
from tools.tiny_task import (
    MISTAKES,
    Response,
    is_right,
    is_wrong,
    split_problems,
    write_tokenizer,
    wrong_response,
)
from tools.tiny_training import Settings, TargetMissed, generate, pick_sampled

SMALL = Settings(  # trained until some prompts are answered rightly, so that accuracies are not all 0
    stop_accuracy=0.05,
    accuracy_range=(0.0, 1.0),
    teacher_steps=10,
    max_reward_steps=30,
    reward_decay_steps=10,
    least_pair_accuracy=0.0,
    num_policy_samples=64,
    num_validation=128,
    num_heldout=128,
)
SMALLEST = replace(SMALL, stop_accuracy=0.0, teacher_steps=2, max_reward_steps=3, reward_decay_steps=2)


def read_lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("tiny") / "made"
    make_tiny.make(out, SMALL, 3)
    return out


# --------------------------------------------------------------------------------------------------- the task


def test_right_answers() -> None:
    assert is_right("132", "132")
    assert is_right(" 132 ", "132")
    assert not is_right("0132", "132")
    assert not is_right("", "132")


def test_no_prompt_is_in_two_sets_nor_its_mirror() -> None:
    split = split_problems(random.Random(0), num_validation=300, num_heldout=200)
    parts = (split.train, split.validation, split.heldout)
    unordered = [{frozenset((problem.left, problem.right)) for problem in part} for part in parts]
    assert [len(part) for part in unordered[1:]] == [300, 200]
    assert not unordered[0] & unordered[1]
    assert not unordered[0] & unordered[2]
    assert not unordered[1] & unordered[2]
    assert len(split.train) == len(set(split.train)) > 7000


def test_the_split_is_a_function_of_the_seed() -> None:
    sources = [random.Random(seed) for seed in (1, 1, 2)]
    first, again, other = (split_problems(source, num_validation=9, num_heldout=9) for source in sources)
    assert first == again
    assert first.heldout != other.heldout


def test_a_wrong_response_is_never_right() -> None:
    source = random.Random(0)
    for answer in ("20", "99", "100", "111", "198"):
        responses = [wrong_response(source, answer) for _ in range(2000)]
        assert not [r for r in responses if r.ended and r.text.strip() == answer]
        assert len(set(responses)) > 200


@pytest.mark.parametrize("name", MISTAKES)
def test_each_kind_of_mistake_is_mostly_wrong_and_short(name: str) -> None:
    source = random.Random(0)
    responses = [MISTAKES[name](source, "132") for _ in range(200)]
    assert sum(is_wrong(response, "132") for response in responses) > 150
    assert max(len(response.text) for response in responses) <= 8


def test_an_unended_right_number_is_wrong() -> None:
    assert is_wrong(Response("132", ended=False), "132")
    assert not is_wrong(Response("132"), "132")


def test_tokenizer_round_trip(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, random.Random(0))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("12+34=", "47+85=132", "0", "", "what is 3 * (4 - 1)?", " 7  7 "):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)  # one token a character, no bos
        assert tokenizer.decode(ids) == text
    assert tokenizer("132</s>")["input_ids"] == [*tokenizer("132")["input_ids"], tokenizer.eos_token_id]
    assert len(tokenizer) == 64


# ------------------------------------------------------------------------------------------ what a run leaves


def test_special_tokens_agree_everywhere(made: Path) -> None:
    for name in ("policy", "reward"):
        tokenizer = AutoTokenizer.from_pretrained(made / name)
        expected = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        assert (*expected, tokenizer.unk_token_id) == (1, 2, 3, 0)
        for file in ("config.json", "generation_config.json") if name == "policy" else ("config.json",):
            config = json.loads((made / name / file).read_text())
            assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == expected


def test_prompts_and_answers(made: Path) -> None:
    train, heldout = read_lines(made / "train.jsonl"), read_lines(made / "heldout.jsonl")
    for row in train + heldout:
        left, right = row["prompt"].removesuffix("=").split("+")
        assert int(left) + int(right) == int(row["answer"])
    unseen = {row["prompt"] for row in heldout}
    assert not unseen & {row["prompt"] for row in train}
    assert not unseen & {row["prompt"] for row in read_lines(made / "pairs.jsonl")}


def test_rows_of_fixed_data_are_right_and_wrong_as_they_say(made: Path) -> None:
    for suffix in ("", "_heldout"):
        prompts = [row["prompt"] for row in read_lines(made / ("heldout.jsonl" if suffix else "train.jsonl"))]
        answers = {prompt: str(sum(map(int, prompt.removesuffix("=").split("+")))) for prompt in prompts}
        completions = read_lines(made / f"sft{suffix}.jsonl")
        pairs, labelled = (read_lines(made / f"{name}{suffix}.jsonl") for name in ("preferences", "labelled"))
        assert all([row["prompt"] for row in rows] == prompts for rows in (completions, pairs, labelled))
        assert all(row["completion"] == answers[row["prompt"]] for row in completions)
        assert all(row["chosen"] == answers[row["prompt"]] for row in pairs)
        assert all(row["rejected"] and row["rejected"].strip() != answers[row["prompt"]] for row in pairs)
        assert all((row["completion"] == answers[row["prompt"]]) == row["label"] for row in labelled)
        assert sum(row["label"] for row in labelled) == len(labelled) // 2


def test_held_out_accuracy_agrees_with_transformers_generate(made: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(made / "policy")
    tokenizer = AutoTokenizer.from_pretrained(made / "policy")
    rows = read_lines(made / "heldout.jsonl")
    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt")
    ids = model.generate(**prompts, do_sample=False, max_new_tokens=8)[:, prompts["input_ids"].shape[1] :]
    responses = tokenizer.batch_decode(ids, skip_special_tokens=True)
    right = sum(response.strip() == row["answer"] for response, row in zip(responses, rows, strict=True))
    report = json.loads((made / "report.json").read_text())
    assert right / len(rows) == pytest.approx(report["policy"]["heldout_accuracy"], abs=1e-6)


def test_pair_accuracy_agrees_one_sequence_at_a_time(made: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(made / "reward")
    tokenizer = AutoTokenizer.from_pretrained(made / "reward")
    rows = read_lines(made / "pairs.jsonl")

    def last_score(text: str) -> float:
        hidden = model.model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        return model.score(hidden[0, -1]).item()

    with torch.no_grad():
        scores = [[last_score(row["prompt"] + row[key]) for key in ("chosen", "rejected")] for row in rows]
    accuracy = sum(chosen > rejected for chosen, rejected in scores) / len(rows)
    report = json.loads((made / "report.json").read_text())
    assert accuracy == pytest.approx(report["reward"]["validation_pair_accuracy"], abs=1.5 / len(rows))


def test_padding_does_not_change_a_score(made: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(made / "reward")
    ids = torch.tensor([[5, 6, 7, 8, 2]])
    with torch.no_grad():
        alone = model(input_ids=ids).logits
        on_the_right = model(input_ids=torch.nn.functional.pad(ids, (0, 4), value=3)).logits
    torch.testing.assert_close(on_the_right, alone)


def test_generation_stops_at_the_end_token_or_the_limit(made: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(made / "policy")
    pick = pick_sampled(torch.Generator().manual_seed(0))
    for response in generate(model, [[5, 6], [5, 6, 7, 8]] * 50, pick, max_tokens=3):
        assert 1 <= len(response) <= 3
        assert 2 not in response[:-1]
        assert response[-1] == 2 or len(response) == 3


def test_the_same_seed_makes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_tiny.make(tmp_path / name, SMALLEST, 5)
    one_out = tmp_path / "one"
    files = sorted(path.relative_to(one_out) for path in one_out.rglob("*") if path.is_file())
    assert len(files) > 10
    for file in files:
        one, two = ((tmp_path / name / file).read_bytes() for name in ("one", "two"))
        if file.name == "report.json":
            one, two = ({**json.loads(text), "seconds": 0} for text in (one, two))
        assert one == two, file


# ----------------------------------------------------------------------------------------------- command line


def test_an_existing_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "mine").write_text("keep")
    assert make_tiny.main([str(tmp_path)]) == 1
    assert make_tiny.main([str(tmp_path), "--if-missing"]) == 1  # there, but not complete
    assert "--overwrite replaces it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_complete_directory_is_left_alone_if_asked(made: Path, capsys: pytest.CaptureFixture) -> None:
    before = (made / "report.json").read_bytes()
    assert make_tiny.main([str(made), "--if-missing"]) == 0
    assert "is complete" in capsys.readouterr().out
    assert (made / "report.json").read_bytes() == before


def test_overwrite_replaces_the_whole_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_tiny, "Settings", lambda: SMALLEST)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("")
    assert make_tiny.main([str(tmp_path / "out"), "--overwrite", "--threads", "1", "--seed", "7"]) == 0
    assert json.loads((tmp_path / "out" / "report.json").read_text())["seed"] == 7
    assert not (tmp_path / "out" / "old").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_missed_target_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    unreachable = replace(SMALLEST, accuracy_range=(0.99, 1.0))
    with pytest.raises(TargetMissed, match=r"policy: validation accuracy is .* not within 0.99 to 1.00"):
        make_tiny.make(tmp_path / "out", unreachable, 0)
    monkeypatch.setattr(make_tiny, "Settings", lambda: unreachable)
    assert make_tiny.main([str(tmp_path / "out"), "--threads", "1"]) == 1
    assert capsys.readouterr().err.startswith("error: policy: validation accuracy")
    assert list(tmp_path.iterdir()) == []
