"""A model that reads the actor's token ids has to mean the same by them."""

import re
import shutil
from pathlib import Path

import pytest

from hybridflow.data.same_tokens import check_same_tokens
from hybridflow.errors import ConfigError
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
    check_same_tokens("reference", tmp_path / "teacher", directory(tmp_path / "actor"))


@pytest.mark.parametrize(("tokens", "told"), [((), "unknown to"), (("<b>", "<a>"), r"\d+ in")])
def test_another_token_at_an_id_is_refused(tmp_path, tokens, told):
    actor, teacher = directory(tmp_path / "actor", "<a>"), directory(tmp_path / "teacher", *tokens)
    whose = f"reference.model = {re.escape(str(teacher))}: its tokenizer"
    with pytest.raises(ConfigError, match=rf"{whose} is .* '<a>', token \d+ of .*, is {told} it \(1 of"):
        check_same_tokens("reference", teacher, actor)
