"""Adapters merged and extracted, with PEFT as the reference."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from hybridflow.architecture.peft_directory import BASE
from hybridflow.convert.adapted import to_peft
from hybridflow.convert.to_huggingface import to_huggingface
from hybridflow.errors import CheckpointError, ConfigError, UserError
from hybridflow.formats.weights_digest import weights_digest
from tests.peft_models import TARGETS, change, change_tensors, model_of, save_adapter, save_as_run, write_by_hand
from tests.tiny_models import make_checkpoints
from tests.tools.convert.tiny import INDEX, Models, assert_same_bytes, left_in, rewrite, tensors_of

FAMILIES = [("llama", True), ("qwen3", False), ("glm", False), ("opt", True), ("glm4_moe", False)]
IDS = torch.tensor([[5, 9, 17, 4, 30, 8, 11]])


def logits(model: object) -> Tensor:
    assert callable(model)
    with torch.no_grad():
        found = model(IDS).logits
    assert isinstance(found, Tensor)
    return found


def close(found: Tensor, expected: Tensor) -> None:
    """To 1e-6 of the largest."""
    assert found.shape == expected.shape and (found - expected).abs().max() <= 1e-6 * max(
        1.0, float(expected.abs().max())
    )


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_a_merged_model_is_the_one_that_peft_merges(family: str, tied: bool, models: Models, tmp_path: Path) -> None:
    """From a directory of PEFT, and from a run's checkpoint with the same adapters; rank-stabilized ones too."""
    base, rslora = models.copy(tmp_path / "base", family, tied=tied), family == "qwen3"
    model = save_adapter(base, tmp_path / "peft", TARGETS[family], use_rslora=rslora)
    before = logits(model)
    to_huggingface(tmp_path / "peft", tmp_path / "merged")
    expected = model.merge_and_unload()
    merged = model_of(tmp_path / "merged")
    close(logits(merged), logits(expected))
    assert (logits(merged) - logits(model_of(base))).abs().max() > 1e-2, "the adapters change the model"
    weights = dict(expected.named_parameters())
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(parameter, weights[name], atol=1e-6, rtol=0)
    run = save_as_run(tmp_path / "peft", base, tmp_path / "step" / "actor")
    to_huggingface(run, tmp_path / "from_run")
    assert_same_bytes(tmp_path / "merged", tmp_path / "from_run")
    to_peft(run, tmp_path / "extracted")
    loaded = PeftModel.from_pretrained(model_of(base), str(tmp_path / "extracted")).eval()
    close(logits(loaded), before)
    assert_same_bytes(tmp_path / "peft", tmp_path / "extracted")
    copied = {"tokenizer.json", "tokenizer.model", "chat_template.jinja", "config.json"}
    assert copied <= set(left_in(tmp_path / "merged")) and "adapter_config.json" not in left_in(tmp_path / "merged")


def test_dense_layers_and_shared_experts_of_a_mixture(models: Models, tmp_path: Path) -> None:
    """W + 6/4 B A by hand: PEFT 0.21 has no name for these layers."""
    base = models.copy(tmp_path / "base", "glm4_moe")
    names = [f"model.layers.0.mlp.{x}_proj" for x in ("gate", "up", "down")]
    names += [f"model.layers.1.mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")]
    weights = tensors_of(base)
    shapes = {name: (weights[f"{name}.weight"].shape[0], weights[f"{name}.weight"].shape[1]) for name in names}
    peft = write_by_hand(base, tmp_path / "peft", shapes)
    to_huggingface(peft, tmp_path / "merged")
    merged, matrices = tensors_of(tmp_path / "merged"), tensors_of(peft)
    for name, weight in weights.items():
        expected, module = weight, name.removesuffix(".weight")
        if module in names:
            a, b = (matrices[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB")
            expected = weight + 1.5 * b @ a
            assert not torch.equal(weight, expected)
        torch.testing.assert_close(merged[name], expected, atol=1e-6, rtol=0)
    run = save_as_run(peft, base, tmp_path / "step" / "actor")
    to_huggingface(run, tmp_path / "from_run")
    assert_same_bytes(tmp_path / "merged", tmp_path / "from_run")
    to_peft(run, tmp_path / "extracted")
    assert_same_bytes(peft, tmp_path / "extracted")


def test_sums_are_rounded_once(models: Models, tmp_path: Path) -> None:
    """Numbers whose sums float32 holds: W + scale B A in bfloat16 is then one rounding, in any order of the sum."""
    base = models.copy(tmp_path / "base", "qwen3")
    save_adapter(base, tmp_path / "peft", ("q_proj", "down_proj"), lora_alpha=2)
    generator = torch.Generator().manual_seed(3)

    def whole(tensor: Tensor) -> Tensor:
        """Eighths from -2 to 2."""
        return torch.randint(-16, 17, tensor.shape, generator=generator) / 8

    weights = {name: whole(tensor).bfloat16() for name, tensor in tensors_of(base).items()}
    rewrite(base, weights)
    matrices = {name: whole(tensor) for name, tensor in tensors_of(tmp_path / "peft").items()}
    change_tensors(tmp_path / "peft", {name.removeprefix("base_model.model."): x for name, x in matrices.items()})
    for dtype in (None, torch.float32):
        target = tmp_path / f"merged-{dtype}"
        to_huggingface(tmp_path / "peft", target, dtype=dtype)
        found, changed = tensors_of(target), 0
        for name, weight in weights.items():
            module, expected = f"base_model.model.{name.removesuffix('.weight')}", weight.double()
            if f"{module}.lora_B.weight" in matrices:
                a, b = (matrices[f"{module}.lora_{x}.weight"].double() for x in "AB")
                expected = expected + 0.5 * b @ a
                changed += 1
            assert torch.equal(found[name], expected.to(dtype or torch.bfloat16)), name
        assert changed == 4


def test_large_models_are_cut_into_files(models: Models, tmp_path: Path) -> None:
    base = models.copy(tmp_path / "base", tied=True)
    rewrite(base, tensors_of(base), num_files=3)
    save_adapter(base, tmp_path / "peft", TARGETS["llama"])
    to_huggingface(tmp_path / "peft", tmp_path / "whole")
    to_huggingface(tmp_path / "peft", tmp_path / "cut", max_shard_bytes=50_000)
    assert (tmp_path / "cut" / INDEX).is_file() and len(list((tmp_path / "cut").glob("*.safetensors"))) > 3
    assert_same_bytes(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("kind", ["policy", "reward"])
def test_a_model_that_scores(kind: str, models: Models, tmp_path: Path) -> None:
    """The value head of the adapters takes the place of that of the base, or of a language model head."""
    base = models.copy(tmp_path / "base", "qwen3", kind=kind)
    model = save_adapter(base, tmp_path / "peft", TARGETS["qwen3"], head="score", modules_to_save=["score"])
    to_huggingface(tmp_path / "peft", tmp_path / "merged")
    merged = model_of(tmp_path / "merged", head="score")
    close(logits(merged), logits(model.merge_and_unload()))
    run = save_as_run(tmp_path / "peft", base, tmp_path / "step" / "critic", head="score")
    to_huggingface(run, tmp_path / "from_run")
    assert_same_bytes(tmp_path / "merged", tmp_path / "from_run")
    to_peft(run, tmp_path / "extracted")
    assert_same_bytes(tmp_path / "peft", tmp_path / "extracted")


def refused(*, base: str | None = None, source: Path, target: Path) -> str:
    with pytest.raises(UserError) as caught:
        to_huggingface(source, target, base=base)
    assert not target.exists()
    return str(caught.value)


def test_a_base_model_that_was_trained_further_is_noticed(models: Models, tmp_path: Path) -> None:
    """By convert, and so by chat and eval; --base takes it all the same."""
    base, adapter = models.copy(tmp_path / "base", "llama"), tmp_path / "peft"
    save_adapter(base, adapter, TARGETS["llama"])
    (adapter / BASE).write_text(json.dumps({"base_weights": weights_digest(base).hex()}))
    to_huggingface(adapter, tmp_path / "before")
    tensors = tensors_of(base)
    rewrite(base, tensors | {"model.norm.weight": tensors["model.norm.weight"] + 1})
    with pytest.raises(ConfigError, match=r"base_model_name_or_path = .*has other weights than those that"):
        to_huggingface(adapter, tmp_path / "after")
    to_huggingface(adapter, tmp_path / "given", base=str(base))


def test_a_merged_model_has_the_positions_that_the_adapters_were_trained_with(models: Models, tmp_path: Path) -> None:
    """As if the base model's config.json said them; the file of the base model stays."""
    base, changed, peft = models.copy(tmp_path / "base", "qwen3"), tmp_path / "changed", tmp_path / "peft"
    save_adapter(base, peft, TARGETS["qwen3"])
    to_huggingface(peft, tmp_path / "plain")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    said = json.loads((base / "config.json").read_text())
    shutil.copytree(base, changed)
    more = {"max_position_embeddings": 64, "rope_parameters": said["rope_parameters"] | yarn}
    (changed / "config.json").write_text(json.dumps(said | more))
    to_huggingface(peft, tmp_path / "expected", base=str(changed))
    record = {"base_weights": weights_digest(base).hex()}
    record["hf_overrides"] = {"max_position_embeddings": 64, "rope_scaling": yarn}
    (peft / BASE).write_text(json.dumps(record))
    to_huggingface(peft, tmp_path / "merged")
    plain, expected, merged = (tmp_path / name for name in ("plain", "expected", "merged"))
    assert json.loads((merged / "config.json").read_text()) == json.loads((expected / "config.json").read_text())
    assert_same_bytes(merged, plain)
    assert torch.equal(logits(model_of(merged)), logits(model_of(expected)))
    assert not torch.equal(logits(model_of(merged)), logits(model_of(plain)))


def test_the_base_model(models: Models, tmp_path: Path) -> None:
    base, peft, target = models.copy(tmp_path / "base", "qwen3"), tmp_path / "peft", tmp_path / "merged"
    save_adapter(base, peft, TARGETS["qwen3"])
    for nothing in (None, ""):
        change(peft, base_model_name_or_path=nothing)
        said = refused(source=peft, target=target)
        assert f"SRC = {peft}: adapter_config.json has base_model_name_or_path = {nothing!r}" in said
        assert "--base DIR" in said
    change(peft, base_model_name_or_path="models/nowhere-else/model")
    said = refused(source=peft, target=target)
    assert "adapter_config.json: base_model_name_or_path = models/nowhere-else/model: no such directory here" in said
    said = refused(source=peft, target=target, base=str(tmp_path / "none"))
    assert said.startswith(f"--base = {tmp_path / 'none'}: no such directory here")
    to_huggingface(peft, target, base=str(base))
    change(peft, base_model_name_or_path=str(base))
    to_huggingface(peft, tmp_path / "again")
    assert_same_bytes(target, tmp_path / "again")
    with pytest.raises(CheckpointError, match="source and target are the same directory"):
        to_huggingface(peft, base, overwrite=True)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama", {"hidden_size": 32, "head_dim": 4}, r"lora_A.weight has shape \(4, 64\), not \(4, 32\): r = 4"),
        ("opt", {}, r"an adapter of model.layers.0.mlp.down_proj, which is no linear layer of .*base2"),
        ("llama", {"num_hidden_layers": 1}, r"an adapter of model.layers.1.mlp.down_proj, which is no linear layer of"),
        (
            "llama",
            {"num_hidden_layers": 3},
            r"adapters of self_attn.q_proj, and none of model.layers.2.self_attn.q_proj",
        ),
    ],
)
def test_another_base_model(family: str, changes: dict[str, int], said: str, models: Models, tmp_path: Path) -> None:

    base = models.copy(tmp_path / "base", "llama")
    save_adapter(base, tmp_path / "peft", TARGETS["llama"])
    other = make_checkpoints(tmp_path / "base2", family=family, tied=False, changes=changes) / "policy"
    with pytest.raises(ConfigError, match=said):
        to_huggingface(tmp_path / "peft", tmp_path / "merged", base=str(other))
    if family == "llama" and "hidden_size" not in changes:
        run = save_as_run(tmp_path / "peft", base, tmp_path / "step" / "actor")
        with pytest.raises(UserError, match=r"belongs to no layer of the base|no tensor model.layers.2"):
            to_huggingface(run, tmp_path / "merged", base=str(other))
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("peft_type", "IA3"),
        ("bias", "all"),
        ("alpha_pattern", {"q_proj": 3}),
        ("modules_to_save", ["embed_tokens"]),
        ("init_lora_weights", "pissa"),
        ("layer_replication", [[0, 1]]),
        ("use_qalora", True),
        ("lora_alpha", None),
        ("r", 0),
    ],
)
def test_other_kinds_of_adapters(field: str, value: object, models: Models, tmp_path: Path) -> None:
    base, peft = models.copy(tmp_path / "base", "qwen3"), tmp_path / "peft"
    save_adapter(base, peft, ("q_proj",))
    change(peft, **{field: value})
    said = refused(source=peft, target=tmp_path / "merged")
    assert said.startswith(f"SRC = {peft}: adapter_config.json has {field} = {value!r}")


def test_what_peft_calls_a_head_by_itself(models: Models, tmp_path: Path) -> None:
    """PEFT adds classifier and score to a model that scores."""
    base = models.copy(tmp_path / "base", "qwen3", kind="reward")
    model = save_adapter(base, tmp_path / "peft", ("q_proj",), head="score")
    to_huggingface(tmp_path / "peft", tmp_path / "merged")
    expected = logits(model.merge_and_unload())
    close(logits(model_of(tmp_path / "merged", head="score")), expected)


def test_an_adapter_of_a_score_without_a_score(models: Models, tmp_path: Path) -> None:
    base, peft = models.copy(tmp_path / "base", "qwen3"), tmp_path / "peft"
    save_adapter(base, peft, ("q_proj",))
    change(peft, task_type="SEQ_CLS")
    said = refused(source=peft, target=tmp_path / "merged")
    assert "task_type = 'SEQ_CLS'" in said and "has score.weight" in said


def test_what_holds_no_adapter_alone(models: Models, tmp_path: Path) -> None:
    base, peft = models.copy(tmp_path / "base", "qwen3"), tmp_path / "peft"
    save_adapter(base, peft, ("q_proj",))
    with pytest.raises(CheckpointError, match="holds no adapter alone"):
        to_peft(base, tmp_path / "target")
    with pytest.raises(CheckpointError, match="is a directory of PEFT already; peft-to-hf merges it"):
        to_peft(peft, tmp_path / "target")


def test_numbers_too_large_for_the_dtype(models: Models, tmp_path: Path) -> None:
    base, peft = models.copy(tmp_path / "base", "qwen3"), tmp_path / "peft"
    save_adapter(base, peft, ("q_proj",))
    change_tensors(peft, {"model.layers.1.self_attn.q_proj.lora_B.weight": torch.full((64, 4), 1e6)})
    with pytest.raises(CheckpointError, match=r"model.layers.1.self_attn.q_proj.weight holds .*too large for torch.f"):
        to_huggingface(peft, tmp_path / "merged", dtype=torch.float16)
