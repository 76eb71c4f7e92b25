"""What a person should know of the adapters of a run, for its plan and its start."""

from pathlib import Path

from hybridflow.architecture.peft_directory import BASE, is_other_base, read_adapter_config
from hybridflow.architecture.weights import num_parameters, num_trained
from hybridflow.config import TrainedRoleConfig
from hybridflow.formats.weights_digest import weights_digest
from hybridflow.placement.placed import PlacedModel, PlacedModels

LOW_RATE = 5e-6  # of adapters; full training takes about a tenth (docs/guides/lora.md)


def adapter_lines(placed: PlacedModels) -> list[str]:
    """A line for each model with adapters, and one for each choice that is rarely meant."""
    lines = []
    for name, model in placed.models.items():
        config, lora = model.config, model.spec.lora
        if lora is None or not isinstance(config, TrainedRoleConfig):
            continue
        lines.append(_trained(name, model, placed))
        if config.optimizer.name == "adam" and 0 < config.optimizer.lr < LOW_RATE:
            lines.append(
                f"{name}.optimizer.lr = {config.optimizer.lr:g} is low for adapters: they take about ten times the "
                "rate of full training"
            )
        if lora.path is not None:
            lines += _other_base(name, lora.path, model.spec.path)
    reference = placed.models.get("reference")
    actor = placed.models.get("actor")
    if reference and actor and actor.spec.lora is not None and reference.spec.path == actor.spec.path:
        lines.append(
            "reference.model is the actor's base model, a second time in memory: without the section reference the "
            "actor without adapters is the reference"
        )
    return lines


def _trained(name: str, model: PlacedModel, placed: PlacedModels) -> str:
    spec = model.spec
    assert spec.lora is not None, "the model has adapters"
    trained, all_of_it = num_trained(spec, model.head), num_parameters(spec, model.head)
    line = f"{name}.lora: trains {trained:,} elements beside {all_of_it - trained:,} frozen ones "
    line += f"(rank {spec.lora.rank}, "
    line += f"scale {spec.lora.scale:g})"
    if spec.num_experts:
        line += "; routed experts have no adapters"
    if name == "actor" and placed.config.reference_is_base:
        own = "with the adapters of adapter_path" if placed.begins_with_adapters else "without adapters"
        line += f"; the reference is the base model {own}, and takes no memory of its own"
    if name == "critic" and placed.critic_shares_base:
        line += "; the frozen ones are the actor's"
    return line


def _other_base(name: str, adapter: Path, model: Path) -> list[str]:
    """Whether adapter_config.json names other weights, which are here to compare."""
    named = read_adapter_config(adapter, f"{name}.lora.adapter_path").get("base_model_name_or_path")
    base = Path(named) if isinstance(named, str) and named else model
    if (adapter / BASE).is_file():
        other = is_other_base(adapter, model)
    else:
        other = base.is_dir() and base != model and weights_digest(base) != weights_digest(model)
    if not other:
        return []
    return [
        f"warning: {name}.lora.adapter_path = {adapter}: these adapters were trained beside {named}, and "
        f"{name}.model = {model} has other weights"
    ]
