"""hybridflow.examples.tiny.make_tiny: the task by itself, then what short runs leave on disk."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hybridflow.examples.tiny import make_tiny, making, models, runs
from hybridflow.examples.tiny.models import Policy, Settings
from hybridflow.examples.tiny.runs import RunFailed
from hybridflow.examples.tiny.task import (
    MISTAKES,
    Problem,
    draw_wrong,
    is_right,
    split_problems,
    write_tokenizer,
    wrong_answer,
)
from tests.tools.runs import BRIEF, in_forks

pytestmark = [pytest.mark.distributed, pytest.mark.thorough]
# until some prompts are answered rightly, so that accuracies are not all 0
LEARNS = ("num_iterations=60", "stop_when=null", "metrics.eval_interval=60")
SMALL = Settings(accuracy_range=(0.0, 1.0), least_pair_accuracy=0.0, num_policy_samples=64, num_validation=128)


def read_lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("tiny") / "made"
    making.make(out, SMALL, seed=3, train=in_forks, overrides=LEARNS)
    return out


# --------------------------------------------------------------------------------------------------- the task


def test_right_answers() -> None:
    assert is_right("9274", "9274")
    assert is_right(" 9274 ", "9274")
    assert not is_right("09274", "9274")
    assert not is_right("", "9274")
    assert (Problem("0729").prompt, Problem("0729").answer) == ("0729=", "9270")


def test_no_prompt_is_in_two_sets_nor_its_mirror() -> None:
    split = split_problems(random.Random(0), num_validation=300, num_heldout=200)
    parts = (split.train, split.validation, split.heldout)
    either_way = [{way for problem in part for way in (problem.digits, problem.digits[::-1])} for part in parts]
    assert [len(part) for part in parts[1:]] == [300, 200]
    assert not either_way[0] & either_way[1]
    assert not either_way[0] & either_way[2]
    assert not either_way[1] & either_way[2]
    assert len(split.train) == len(set(split.train)) > 8000


def test_the_split_is_a_function_of_the_seed() -> None:
    sources = [random.Random(seed) for seed in (1, 1, 2)]
    first, again, other = (split_problems(source, num_validation=9, num_heldout=9) for source in sources)
    assert first == again
    assert first.heldout != other.heldout


def test_a_wrong_answer_is_never_right() -> None:
    source = random.Random(0)
    for answer in ("0000", "1221", "9274", "0700"):
        texts = [wrong_answer(source, answer) for _ in range(2000)]
        assert all(texts) and answer not in {text.strip() for text in texts}
        assert len(set(texts)) > 200


@pytest.mark.parametrize("name", MISTAKES)
def test_each_kind_of_mistake_is_mostly_wrong_and_short(name: str) -> None:
    source = random.Random(0)
    texts = [MISTAKES[name](source, "9274") for _ in range(200)]
    assert sum(not is_right(text, "9274") for text in texts) > 150
    assert max(map(len, texts)) <= 8


def test_half_of_the_wrong_answers_are_the_policys_own() -> None:
    source, problem = random.Random(0), Problem("4729")
    own = [draw_wrong(source, problem, {problem: ["its own"]}) for _ in range(2000)].count("its own")
    assert 900 < own < 1100
    assert "its own" not in {draw_wrong(source, problem, {Problem("4720"): ["its own"]}) for _ in range(100)}


def test_tokenizer_round_trip(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, random.Random(0))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("4729=", "4729=9274", "0", "", "what is 3 * (4 - 1)?", " 7  7 "):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)  # one token a character, no bos
        assert tokenizer.decode(ids) == text
    assert tokenizer("9274</s>")["input_ids"] == [*tokenizer("9274")["input_ids"], tokenizer.eos_token_id]
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
        assert row["prompt"] == "".join(reversed(row["answer"])) + "="
    unseen = {row["prompt"] for row in heldout}
    assert not unseen & {row["prompt"] for row in train}
    for name in ("sft", "preferences", "labelled"):
        assert not unseen & {row["prompt"] for row in read_lines(made / f"{name}.jsonl")}


def test_rows_of_fixed_data_are_right_and_wrong_as_they_say(made: Path) -> None:
    for suffix in ("", "_heldout"):
        prompts = [row["prompt"] for row in read_lines(made / ("heldout.jsonl" if suffix else "train.jsonl"))]
        answers = {prompt: prompt.removesuffix("=")[::-1] for prompt in prompts}
        completions = read_lines(made / f"sft{suffix}.jsonl")
        pairs, labelled = (read_lines(made / f"{name}{suffix}.jsonl") for name in ("preferences", "labelled"))
        assert all([row["prompt"] for row in rows] == prompts for rows in (completions, pairs, labelled))
        assert all(row["completion"] == answers[row["prompt"]] for row in completions)
        assert all(row["chosen"] == answers[row["prompt"]] for row in pairs)
        assert all(row["rejected"] and row["rejected"].strip() != answers[row["prompt"]] for row in pairs)
        assert all((row["completion"] == answers[row["prompt"]]) == row["label"] for row in labelled)
        assert sum(row["label"] for row in labelled) == len(labelled) // 2


def test_held_out_accuracy_agrees_one_token_at_a_time(made: Path) -> None:
    """The report's, with this file's own greedy loop: no cache, no padding."""
    model = AutoModelForCausalLM.from_pretrained(made / "policy")
    tokenizer = AutoTokenizer.from_pretrained(made / "policy")
    rows = read_lines(made / "heldout.jsonl")
    ids = tokenizer([row["prompt"] for row in rows], return_tensors="pt")["input_ids"]
    start = ids.shape[1]
    with torch.no_grad():
        for _ in range(8):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    texts = [tokenizer.decode(row).split("</s>")[0] for row in ids[:, start:].tolist()]
    right = sum(text.strip() == row["answer"] for text, row in zip(texts, rows, strict=True))
    report = json.loads((made / "report.json").read_text())
    assert right / len(rows) == report["policy"]["heldout_accuracy"] > 0


def test_pair_accuracy_agrees_one_sequence_at_a_time(made: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(made / "reward")
    tokenizer = AutoTokenizer.from_pretrained(made / "reward")
    rows = read_lines(made / "preferences_heldout.jsonl")

    def last_score(text: str) -> float:
        hidden = model.model(**tokenizer(text, return_tensors="pt")).last_hidden_state
        return model.score(hidden[0, -1]).item()

    with torch.no_grad():
        scores = [[last_score(f"{row['prompt']}{row[key]}</s>") for key in ("chosen", "rejected")] for row in rows]
    accuracy = sum(chosen > rejected for chosen, rejected in scores) / len(rows)
    report = json.loads((made / "report.json").read_text())
    assert accuracy == pytest.approx(report["reward"]["heldout_pair_accuracy"], abs=1.5 / len(rows))
    assert 0.5 < accuracy < 1.0


def test_mistakes_are_what_the_policy_writes(made: Path) -> None:
    policy = Policy.load(made / "policy", SMALL)
    problems = split_problems(random.Random(3), num_validation=128, num_heldout=256).heldout
    torch.manual_seed(0)
    written = policy.answers(problems, sampled=True)
    torch.manual_seed(0)
    mistakes = policy.mistakes(problems)
    right = {problem for problem, text in zip(problems, written, strict=True) if text == problem.answer}
    assert right and not right & mistakes.keys()
    assert all(mistakes.get(problem, [text]) == [text] for problem, text in zip(problems, written, strict=True))
    own = [text for texts in mistakes.values() for text in texts]
    rejected = {row["rejected"] for row in read_lines(made / "preferences_heldout.jsonl")}
    assert len(own) > 200 and len(rejected & set(own)) > 5, "some of what it writes is judged"


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


def test_overwrite_replaces_the_whole_directory_and_the_same_seed_makes_the_same_bytes(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "Settings", lambda **fields: replace(SMALL, **fields))
    monkeypatch.setattr(runs, "by_command", lambda arguments, log: in_forks([*arguments, *LEARNS]))
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("")
    assert make_tiny.main([str(out), "--overwrite", "--seed", "3"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    files = [sorted(path.relative_to(top) for path in top.rglob("*") if path.is_file()) for top in (made, out)]
    assert files[0] == files[1] and len(files[0]) > 20
    for file in files[0]:
        one, two = ((top / file).read_bytes() for top in (made, out))
        if file.name == "report.json":
            one, two = ({**json.loads(text), "seconds": 0} for text in (one, two))
        assert one == two, file


def test_a_missed_target_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(models, "Settings", lambda **fields: replace(SMALL, accuracy_range=(0.99, 1.0), **fields))
    monkeypatch.setattr(runs, "by_command", lambda arguments, log: in_forks([*arguments, *BRIEF]))
    assert make_tiny.main([str(tmp_path / "out")]) == 1
    error = "error: policy: validation accuracy is 0.000, not within 0.99 to 1.00; try another --seed\n"
    assert capsys.readouterr().err.endswith(error)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="seed 0: policy has ended with status 3"):
        making.make(tmp_path / "out", SMALL, seed=0, train=lambda arguments, log: 3)
    assert list(tmp_path.iterdir()) == []
