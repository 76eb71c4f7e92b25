"""A model that reads the actor's token ids has to mean the same by them."""

import json
import re
import shutil
from base64 import b64encode
from pathlib import Path

import pytest

from hybridflow.config import ExperimentConfig
from hybridflow.data.same_tokens import check_same_tokens, check_tokenizers
from hybridflow.data.tokenizers import keep_tokenizer_class, load_tokenizer, unlike_its_file
from hybridflow.errors import CheckpointError, ConfigError
from tests.distributed.tiny_experiment import make_inputs, write_config
from tests.tiny_models import make_tokenizer


def directory(path: Path, *added: str) -> Path:
    """A tokenizer with tokens of its own after those that all have."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(list(added))
    tokenizer.save_pretrained(path)
    return path


def test_the_same_tokens_and_more_of_them_are_read(tmp_path):
    actor = directory(tmp_path / "actor", "<a>")
    check_same_tokens("reference", actor, actor)
    check_same_tokens("reference", Path(shutil.copytree(actor, tmp_path / "copy")), actor)
    check_same_tokens("reference", directory(tmp_path / "more", "<a>", "<b>"), actor)


def test_a_directory_without_a_tokenizer_has_the_actors(tmp_path):
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / "config.json").write_text('{"model_type": "llama"}')
    actor, teacher = directory(tmp_path / "actor"), tmp_path / "teacher"
    found = check_same_tokens("reference", teacher, actor)
    assert (
        found == f"reference.model = {teacher} has no tokenizer: hybridflow assumes the tokens of actor.model = {actor}"
    )
    shutil.copy(actor / "tokenizer_config.json", teacher)  # of which alone transformers makes up a tokenizer
    assert check_same_tokens("reference", teacher, actor) == found
    with pytest.raises(
        CheckpointError, match=f"^{re.escape(str(teacher))}: has no tokenizer: none of tokenizer.json, "
    ):
        load_tokenizer(teacher)


@pytest.mark.parametrize(("tokens", "told"), [((), "unknown to"), (("<b>", "<a>"), r"\d+ in")])
def test_another_token_at_an_id_is_refused(tmp_path, tokens, told):
    actor, teacher = directory(tmp_path / "actor", "<a>"), directory(tmp_path / "teacher", *tokens)
    whose = f"reference.model = {re.escape(str(teacher))}: the tokenizer"
    with pytest.raises(
        ConfigError, match=rf"{whose} differs .* '<a>', token \d+ of .*, is {told} this tokenizer \(1 of"
    ):
        check_same_tokens("reference", teacher, actor)


@pytest.mark.parametrize("role", ["critic", "reference", "reward.models.0"])
def test_every_model_of_a_run_is_compared(tmp_path, role):
    """A reward model whose texts are encoded anew may have another tokenizer."""
    root = make_inputs(tmp_path / "inputs")
    for name in ("policy", "critic", "reference", "reward"):
        directory(root / name, "<a>", "<b>")
    file = write_config(tmp_path / "run.yaml", root)
    alike = "tokenizers: of critic, reference, reward.models.0 as of actor"
    assert check_tokenizers(ExperimentConfig.from_yaml(file)) == [alike]
    other = directory(
        Path(shutil.copytree(root / role.replace("reward.models.0", "reward"), tmp_path / "x")), "<b>", "<a>"
    )
    changed = ExperimentConfig.from_yaml(file, [f"{role}.model={other}"])
    with pytest.raises(ConfigError, match=rf"^{role}\.model = {re.escape(str(other))}: the tokenizer differs "):
        check_tokenizers(changed)
    if role.startswith("reward"):
        free = ExperimentConfig.from_yaml(file, [f"{role}.model={other}", f"{role}.reencode=true"])
        assert check_tokenizers(free) == ["tokenizers: of critic, reference as of actor"]


# ------------------------------------------------------------------------------------------------ tokenizer.json


def qwen_directory(path: Path, model: object) -> Path:
    """A tokenizer.json that transformers reads by its class for Qwen2, whatever the file says."""
    from tokenizers import Tokenizer, pre_tokenizers

    path.mkdir()
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text('{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}')
    return path


def test_a_tokenizer_that_transformers_reads_as_its_file_says_needs_no_words(tmp_path):
    path = directory(tmp_path / "policy")
    assert unlike_its_file(path, load_tokenizer(path)) is None


def test_a_class_that_replaces_parts_of_the_file_is_told(tmp_path):
    """The file parts words at white space; the class of Qwen2 by its own pattern, on bytes."""
    from tokenizers.models import BPE

    letters = ["\u0120", *map(chr, range(33, 127))]  # the first stands for a space where bytes are tokens
    path = qwen_directory(tmp_path / "q", BPE({letter: i for i, letter in enumerate(letters)}, []))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    told = unlike_its_file(path, load_tokenizer(path))
    assert told is not None and told.startswith(f"transformers reads {path} as a Qwen2Tokenizer")
    assert "encodes text otherwise than tokenizer.json" in told


def test_a_class_that_makes_no_tokens_is_refused(tmp_path):
    from tokenizers.models import WordLevel

    path = qwen_directory(tmp_path / "q", WordLevel({"<unk>": 0, "Solve": 1}, unk_token="<unk>"))
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(path))}/tokenizer.json: .* makes no tokens of text"):
        unlike_its_file(path, load_tokenizer(path))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 3554214752\n"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tokenizer.json": POINTER}, "{}/tokenizer.json: is a pointer of git-lfs"),
        ({"tokenizer.json": '{"model": {"ty'}, "{}/tokenizer.json: is not JSON: Unterminated string"),
        ({"tokenizer_config.json": "<!doctype html>"}, "{}/tokenizer_config.json: is not JSON: "),
        ({"tokenizer.json": None, "tekken.json": "{}"}, "{}/tekken.json: is the directory's only vocabulary"),
        (
            {
                **{"tokenizer.json": None, "tiktoken.model": "AA== 0", "tokenization_own.py": "raise SystemExit"},
                "tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["tokenization_own.Own", null]}}',
            },
            "{}: its tokenizer is code of the directory (tokenizer_config.json: auto_map = ['tokenization_own.Own', ",
        ),
    ],
)
def test_files_that_are_no_tokenizer_are_named(files: dict[str, str | None], said: str, tmp_path: Path) -> None:
    path = directory(tmp_path / "q")
    for name, text in files.items():
        (path / name).unlink(missing_ok=True)
        if text is not None:
            (path / name).write_text(text)
    with pytest.raises(CheckpointError, match=f"^{re.escape(said.format(path))}"):
        load_tokenizer(path)


def test_truncation_and_padding_of_the_file_are_no_ones(tmp_path: Path) -> None:
    """transformers leaves both to each call, whatever tokenizer.json says."""
    path = directory(tmp_path / "q")
    tree, expected = json.loads((path / "tokenizer.json").read_text()), load_tokenizer(path)("12+3=" * 9)["input_ids"]
    cut = {"direction": "Right", "max_length": 6, "strategy": "OnlySecond", "stride": 0}
    filled = {"strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 3}
    filled |= {"pad_type_id": 0, "pad_token": "<pad>"}
    (path / "tokenizer.json").write_text(json.dumps(tree | {"truncation": cut, "padding": filled}))
    tokenizer = load_tokenizer(path)
    assert unlike_its_file(path, tokenizer) is None and tokenizer("12+3=" * 9)["input_ids"] == expected


def test_tokenizer_json_is_read_beside_tekken_json(tmp_path: Path) -> None:
    """transformers would take the latter, for a class without chat templates."""
    path = directory(tmp_path / "mistral")
    (path / "config.json").write_text('{"model_type": "mistral"}')
    (path / "tekken.json").write_text("{}")
    assert load_tokenizer(path)("1+2=")["input_ids"] == make_tokenizer()("1+2=")["input_ids"]


def test_kimi_with_yarn_as_published(tmp_path: Path) -> None:
    """transformers knows the model type under another name alone."""
    path = directory(tmp_path / "kimi")
    yarn = {
        "type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
    }
    described = {"model_type": "kimi_k2", "max_position_embeddings": 131072, "rope_theta": 5e4, "rope_scaling": yarn}
    (path / "config.json").write_text(json.dumps(described))
    assert load_tokenizer(path)("1+2=")["input_ids"] == make_tokenizer()("1+2=")["input_ids"]


def test_a_tiktoken_file_is_read_anew_behind_the_same_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tiktoken keeps a copy of what it has read, by the path as it is given."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "kept"))
    found = []
    for number, pair in enumerate((b"ab", b"bc")):
        (tmp_path / str(number) / "q").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / str(number))
        tokens = [*(bytes([i]) for i in range(256)), pair]
        lines = "".join(f"{b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens))
        Path("q/tokenizer.model").write_text(lines)
        Path("q/config.json").write_text('{"model_type": "llama"}')
        found.append(load_tokenizer(Path("q"))("abc", add_special_tokens=False)["input_ids"])
    assert found == [[256, 99], [97, 256]]


def test_the_class_of_a_wrappers_tokenizer_stays_without_the_wrapper(tmp_path: Path) -> None:
    """transformers reads a published Qwen3.5 by its own class, and by the named one once model_type is another."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    text, tokens = "\u0928\u093f", sorted(ByteLevel.alphabet())  # a letter and a mark: one word, or two
    found = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    merges = [tuple(found[:2]), (found[:2], found[2]), (found[:2], found[5]), (found[:3], found[3:])]
    tokens += ["".join(merge) for merge in merges]
    source, target = tmp_path / "source", tmp_path / "target"
    for path, kind in ((source, "qwen3_5"), (target, "qwen3_5_text")):
        path.mkdir()
        Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges)).save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer", "eos_token": "!"}')
        (path / "config.json").write_text(json.dumps({"model_type": kind}))
    expected = load_tokenizer(source)(text)["input_ids"]
    assert expected == [len(tokens) - 1] != load_tokenizer(target)(text)["input_ids"]
    keep_tokenizer_class(source, target)
    assert load_tokenizer(target)(text)["input_ids"] == expected
    said = json.loads((target / "tokenizer_config.json").read_text())
    assert said == {"tokenizer_class": "Qwen3_5Tokenizer", "eos_token": "!"}
