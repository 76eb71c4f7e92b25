"""A model that reads the actor's token ids has to mean the same by them."""

import re
import shutil
from pathlib import Path

import pytest

from hybridflow.config import ExperimentConfig
from hybridflow.data.same_tokens import check_same_tokens, check_tokenizers
from hybridflow.data.tokenizers import load_tokenizer, unlike_its_file
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
