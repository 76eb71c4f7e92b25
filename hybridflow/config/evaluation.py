"""The config of an evaluation, made of the config of a run or of nothing: trees in, trees out.

tree = evaluation_tree(read_tree("runs/math/config.yaml"), model="runs/math/hf", name="hf", output_dir="...", ...)
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.config.data import is_sets, is_tasks
from hybridflow.config.hub import cached_directory
from hybridflow.errors import ConfigError

Tree = dict[str, Any]
ONLY = "heldout"  # what the only set of a config is called where it needs a name
MAX_PROMPT_TOKENS, MAX_TOKENS = 1024, 512  # where no config says it
NO_METRICS = {"csv": False, "tensorboard": False, "wandb": None, "mlflow": None, "dump_batches": False}
NO_CHECKPOINTS = {"load": "none", "save_interval": 0, "save_minutes": None}
# never called: nothing is trained. Where a config has no reward, no shipped algorithm takes the config
NO_REWARD = {"name": "custom", "flow": "hybridflow.flows.reinforce:reinforce", "roles": ["actor"]}
WITH_REWARD = {"name": "reinforce", "kl": {"use": "none"}}


def evaluation_tree(
    tree: Mapping[str, Any],
    *,
    model: str,
    name: str,
    output_dir: str,
    sets: Mapping[str, Any],
    adapter: str | None = None,
    samples: int | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    reward: str | None = None,
    threshold: float | None = None,
) -> Tree:
    """The actor, its rewards and its held-out sets as a run has them; critic, reference and training go.

    adapter: a directory of adapters of the model. sets: in place of data.heldout, files by name. samples and
    temperature: of all sets. Errors: ConfigError.
    """
    sampling, actor, data = (dict(_section(tree, key)) for key in ("sampling", "actor", "data"))
    if max_tokens is not None:
        sampling |= {"max_response_length": max_tokens, "min_response_length": 0, "expected_response_length": None}
        if isinstance(buckets := sampling.get("by_prompt_length"), list):
            dropped = {"max_response_length": None}
            sampling["by_prompt_length"] = [{**one, **dropped} if isinstance(one, dict) else one for one in buckets]
    heldout: Any = {key: {"files": files} for key, files in sets.items()} or data.get("heldout")
    if heldout is None:
        raise ConfigError("data.heldout = null: give --data FILE, rows to evaluate on")
    if samples is not None or temperature is not None:
        heldout = _sampled(heldout, samples, temperature, float(sampling.get("temperature", 1.0)))
    metrics = {**_section(tree, "metrics"), **NO_METRICS, "eval_interval": 1}
    metrics |= {
        key: value for key, value in (("eval_reward", reward), ("eval_threshold", threshold)) if value is not None
    }
    actor["model"] = model
    if adapter is not None or actor.get("lora") is not None:  # a whole model has those of the run already
        actor["lora"] = None if adapter is None else {"adapter_path": adapter}
    scored = tree.get("reward") is not None or data.get("environment") is not None
    return {
        **tree,
        "name": name,
        "output_dir": output_dir,
        "num_iterations": 1,
        "data": {**data, **_training_rows(data, heldout), "heldout": _without_intervals(heldout)},
        "sampling": sampling,
        "actor": actor,
        "critic": None,
        "reference": None,
        "algorithm": WITH_REWARD if scored else NO_REWARD,
        "stop_when": None,
        "checkpoint": NO_CHECKPOINTS,
        "metrics": metrics,
    }


def with_overrides(tree: Mapping[str, Any], model: str, recorded: Mapping[str, Any], *, adapted: bool) -> Tree:
    """`actor.hf_overrides` of the evaluated model: what its adapters record, else what the tree says.

    Where no adapters are evaluated, the tree's key is of the tree's model alone.
    """
    actor = dict(_section(tree, "actor"))
    given, named = actor.pop("hf_overrides", None), actor.get("model")
    kept = recorded or (given if adapted or _is_same(model, named) else None)
    return {**tree, "actor": actor if kept is None else {**actor, "hf_overrides": kept}}


def _is_same(model: str, named: object) -> bool:
    one, other = (Path(cached_directory(each)).expanduser().resolve() for each in (model, str(named)))
    return one == other


def bare_tree(
    *, max_positions: int, max_tokens: int, chat_template: bool, chat_template_kwargs: Mapping[str, Any]
) -> Tree:
    """Of a model that no config speaks of. Errors: ConfigError where a response leaves no room for a prompt."""
    prompt = min(MAX_PROMPT_TOKENS, max_positions - max_tokens)
    if prompt < 1:
        raise ConfigError(
            f"--max-tokens {max_tokens}: leaves no room for a prompt; the model takes {max_positions} tokens"
        )
    return {
        "data": {
            "prompts_per_iteration": 1024,  # an iteration that there is not; no fewer than replicas
            "max_prompt_length": prompt,
            "chat_template": chat_template,
            "chat_template_kwargs": dict(chat_template_kwargs),
        },
        "sampling": {"max_response_length": max_tokens},
        "actor": {"optimizer": {"lr": 0.0}},
    }


def _section(tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = tree.get(key)
    return found if isinstance(found, dict) else {}


def _sampled(heldout: Any, samples: int | None, temperature: float | None, of_training: float) -> Tree:
    """Sets by name, with other samples and temperatures. of_training: temperature of several where a set has none."""
    sets = heldout if is_sets(heldout) else {ONLY: {"files": heldout}}
    found = {}
    for name, each in sets.items():
        own = dict(each) if isinstance(each, dict) else {"files": each}
        own |= {} if samples is None else {"samples": samples}
        if temperature is not None:
            own["temperature"] = temperature
        elif own.get("samples", 1) > 1:
            own["temperature"] = own.get("temperature") or of_training
        found[name] = own
    return found


def _without_intervals(heldout: Any) -> Any:
    """An evaluation without training is on all sets."""
    if not is_sets(heldout):
        return heldout
    return {
        name: {key: value for key, value in each.items() if key != "interval"} if isinstance(each, dict) else each
        for name, each in heldout.items()
    }


def _training_rows(data: Mapping[str, Any], heldout: Any) -> Tree:
    """Nobody trains: the rows of the first set stand for those to train on, which need not be here.

    Tasks stay: held-out ones have to be others.
    """
    first = next(iter(heldout.values())) if is_sets(heldout) else heldout
    files = first.get("files") if is_sets(heldout) and isinstance(first, dict) else first
    return {} if is_tasks(files) and is_tasks(data.get("train")) else {"train": files}
