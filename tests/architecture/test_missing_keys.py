"""config.json with a key left out: read as transformers reads it, whose reading vLLM takes, or refused by the key."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from hybridflow.architecture.spec import read_spec
from hybridflow.errors import CheckpointError
from tests.tiny_models import FAMILIES, LLAMA_SIZES, ROPE_YARN, TEXT

# no size is a default of any family, and every default of num_key_value_heads divides the heads
SIZES = {"vocab_size": 100, "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 64, "bos_token_id": 1}
POSITIONS = {"max_position_embeddings": 96, "eos_token_id": 2, "pad_token_id": 3}
NO_YARN = ("opt", "gemma3", "phi3", "ministral3", "olmo3")


def complete(family: str, **changes: Any) -> dict[str, Any]:
    """config.json with every key that transformers knows."""
    prefix, extra = FAMILIES[family]
    of_family = (
        {"word_embed_proj_dim": 512} if prefix == "OPT" else {**LLAMA_SIZES, "num_key_value_heads": 16, "head_dim": 16}
    )
    if "kv_lora_rank" in extra:
        extra = extra | {"num_key_value_heads": SIZES["num_attention_heads"]}
    changes = copy.deepcopy(changes)  # transformers fills in what an inner object lacks
    given = {**SIZES, **POSITIONS, **of_family, **extra, **changes, "architectures": [f"{prefix}ForCausalLM"]}
    found: dict[str, Any] = json.loads(
        getattr(transformers, f"{TEXT.get(prefix, prefix)}Config")(**given).to_json_string(use_diff=False)
    )
    return found


def without_one(tree: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each key in turn, those of inner objects too."""
    for key, value in tree.items():
        yield key, {name: other for name, other in tree.items() if name != key}
        for inner in value if isinstance(value, dict) else ():
            yield inner, {**tree, key: {name: other for name, other in value.items() if name != inner}}


def read(directory: Path, tree: dict[str, Any]) -> dict[str, Any] | str:
    """The spec's fields, or the error."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(tree))
    try:
        return vars(read_spec(directory)) | {"path": None}
    except CheckpointError as error:
        return str(error).replace(str(directory), "")


@pytest.mark.parametrize("changes", [{}, {"rope_parameters": ROPE_YARN}], ids=["plain", "yarn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_key_means_what_transformers_makes_of_it(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    if changes and family.startswith(NO_YARN):
        pytest.skip("the family turns nothing, or by angles of its own")
    prefix = FAMILIES[family][0]
    whole, config_class = complete(family, **changes), getattr(transformers, f"{TEXT.get(prefix, prefix)}Config")
    assert isinstance(read(tmp_path / "whole", whole), dict)
    seen = 0
    for key, less in without_one(whole):
        ours = read(tmp_path / "less", less)
        if isinstance(ours, str):
            assert key in ours, f"without {key}: {ours}"
            continue
        theirs = json.loads(config_class.from_pretrained(tmp_path / "less").to_json_string(use_diff=False))
        assert ours == read(tmp_path / "theirs", theirs | {"architectures": whole["architectures"]}), f"without {key}"
        seen += 1
    assert seen > 20
