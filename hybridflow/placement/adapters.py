"""The adapters of a role, from the role's section `lora` and, where that names one, a directory of PEFT."""

from pathlib import Path

from hybridflow.architecture.adapter_weights import is_linear, modules_of
from hybridflow.architecture.lora import ALL_LINEAR, Lora, names
from hybridflow.architecture.peft_directory import check_no_score, lora_of_directory, recorded_overrides
from hybridflow.architecture.spec import ModelSpec, read_spec
from hybridflow.architecture.weights import layer_weights
from hybridflow.config.files import as_flow
from hybridflow.config.lora import ALPHA, RANK, LoraConfig
from hybridflow.errors import ConfigError, remedy


def read_lora(key: str, config: LoraConfig, spec: ModelSpec, seed: int) -> Lora:
    """key: of the section. seed: what new adapters are drawn from. Errors: ConfigError, naming the key."""
    if config.adapter_path is not None:
        found = _of_directory(key, config, Path(config.adapter_path), spec)
    else:
        given = config.target_modules
        targets = None if given is None or given == ALL_LINEAR else tuple(given)
        alpha, rslora = float(config.alpha or ALPHA), bool(config.use_rslora)
        found = Lora(config.rank or RANK, alpha, targets, config.exclude_modules, use_rslora=rslora, seed=seed)
    _check_names(key, found, spec)
    return found


def _of_directory(key: str, config: LoraConfig, path: Path, spec: ModelSpec) -> Lora:
    name = f"{key}.adapter_path"
    found = lora_of_directory(path, spec, name)
    if key == "actor.lora":  # the other models that are trained score
        check_no_score(path, found, name)
    for field in ("rank", "alpha", "use_rslora"):
        mine, theirs = getattr(config, field), getattr(found, field)
        if mine is not None and mine != theirs:
            raise ConfigError(
                f"{key}.{field} = {mine}: the adapters of {name} = {path} have {theirs}"
                f"{remedy({f'{key}.{field}': [None, theirs]})}"
            )
    _check_overrides(f"{key.removesuffix('.lora')}.hf_overrides", name, path, spec)
    return found


def _check_overrides(key: str, name: str, path: Path, spec: ModelSpec) -> None:
    """Adapters that were trained with `hf_overrides` go on with the same positions. Errors: ConfigError."""
    if not (recorded := recorded_overrides(path)):
        return
    trained = read_spec(spec.path, overrides=recorded)
    if (trained.max_positions, trained.rope) != (spec.max_positions, spec.rope):
        raise ConfigError(
            f"{key} = {as_flow(spec.overrides)}: the adapters of {name} = {path} were trained with "
            f"{as_flow(recorded)}. Set {key}={as_flow(recorded)}, or merge the adapters by `hybridflow convert` "
            "and train the merged model"
        )


def _check_names(key: str, lora: Lora, spec: ModelSpec) -> None:
    """Each name is that of a linear layer that can have an adapter, and some layer has one."""
    known = linear_layers(spec)
    for field, given in (("target_modules", lora.targets or ()), ("exclude_modules", lora.excluded)):
        for name in given:
            if not any(names(name, module) for module in known):
                short = dict.fromkeys(module.rsplit(".", 1)[1] for module in known)
                there = [each for each in given if any(names(each, module) for module in known)]
                fitting = there or (ALL_LINEAR if field == "target_modules" else [])
                raise ConfigError(
                    f"{key}.{field}: {name} names no linear layer of {spec.path} that can have an adapter; these can: "
                    f"{', '.join(short)}{remedy({f'{key}.{field}': [fitting]})}"
                )
    if not any(map(lora.adapts, known)):
        why = f"{key}.exclude_modules = {list(lora.excluded)} leaves no linear layer with an adapter"
        raise ConfigError(f"{why}{remedy({f'{key}.exclude_modules': [[]]})}")


def linear_layers(spec: ModelSpec) -> list[str]:
    """Names of the linear layers that can have adapters, with {layer} in place of the number."""
    weights = (weight for kind in spec.layer_kinds for weight in layer_weights(spec.base, kind) if is_linear(weight))
    return list(dict.fromkeys(module for weight in weights for module in modules_of(weight)))
