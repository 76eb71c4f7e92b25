"""Evaluate a model on held-out sets, without training:

    hybridflow eval runs/math                                  the sets of the run, on the last checkpoint
    hybridflow eval runs/math --checkpoint 40 -k 16            on a checkpoint, 16 responses to each prompt
    hybridflow eval Qwen/Qwen2.5-0.5B configs/math.yaml        a name on the Hub or a directory, as a config says
    hybridflow eval runs/math/hf --data test.jsonl --reward hybridflow.rewards:numeric_match

RUN_OR_MODEL is a run's directory, one of a run's checkpoints, a model's directory or a name on the Hub. A run without
checkpoints has a model in hf/. A directory of PEFT is evaluated on the base model that adapter_config.json names, or
on --base. CONFIG says how prompts, responses and scores are made. Without CONFIG the config of the
run does, or the options alone. A CONFIG beside which your functions lie has to be named. Overrides such as
rollout.kv_cache_gib=4 replace values of the config. The command starts ranks as `hybridflow train` does, with the same
layouts. Engine, reward functions, environments and agents are those of training.

Of data.heldout each set has the samples and the temperature that the config says: one greedy response in a set without
a name. -k draws so many responses to each prompt, at sampling.temperature unless the set or --temperature says another.
The seeds of a set are the same for each layout and each model.

    avg@k        the share of right responses: of all k to each prompt
    pass@k       the probability that one of k responses is right, without bias (Chen et al. 2021)
    majority@k   the share of prompts whose most frequent answer is right; of equally frequent ones the first counts

Right is a score of metrics.eval_threshold or more, by metrics.eval_reward, else the environment, else the functions of
the section reward. `score` is the mean score that trains. Results lie in RUN/eval/NAME, or in eval/NAME without a run,
where NAME is the checkpoint or the model:

    results.json     the table, with all digits          SET.jsonl        each response; `hybridflow samples FILE`
    config.yaml      what was evaluated, and how          logs/            the log of each rank

Results of an earlier evaluation there are replaced. The exit status is 0 after an evaluation, 1 after an error and 70
where a rank was stuck.
"""

import os
import re
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridflow import __version__
from hybridflow.checkpoint.store import CHECKPOINTS, MANIFEST, damage, read_manifest, step_name, steps
from hybridflow.cli import train
from hybridflow.cli.chat import CONFIG, holds_adapter, prompts_of_run, run_of_model, spec_that_talks
from hybridflow.cli.command import argument_parser, positive, print_error
from hybridflow.cli.files_of_tree import read_config
from hybridflow.config.auto import with_neutral
from hybridflow.config.data import SET_NAME
from hybridflow.config.evaluation import MAX_TOKENS, bare_tree, evaluation_tree, with_overrides
from hybridflow.config.files import as_yaml, read_tree, read_value
from hybridflow.config.hub import fetch_models, fetched, is_hub_name, use_variables
from hybridflow.errors import CheckpointError, ConfigError, Reasons, RunDirError, UserError
from hybridflow.formats.gguf_files import gguf_hint
from hybridflow.user_code import search_beside

EVALUATIONS = "eval"


@dataclass(frozen=True)
class EvaluatedModel:
    """model: a directory, or a name on the Hub. name: of the evaluation. run: a directory, if a run is known.

    adapter: a directory of adapters, where the model is their base.
    """

    model: str
    name: str
    run: Path | None
    adapter: str | None = None


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser("hybridflow.cli.evaluate", __doc__)
    parser.add_argument(
        "model", metavar="RUN_OR_MODEL", help="a run, a checkpoint, a model's directory, or a name on the Hub"
    )
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG | section.key=value", help="a config, and values to replace"
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="[NAME=]FILE",
        help="rows in place of data.heldout; several times",
    )
    parser.add_argument(
        "--checkpoint", type=int, metavar="STEP", help="of the run, after this iteration (default: the last)"
    )
    parser.add_argument(
        "--base", metavar="MODEL", help="base model of adapters (default: that of their adapter_config.json)"
    )
    parser.add_argument("-k", type=positive, metavar="K", dest="samples", help="responses to each prompt")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="temperature of all sets; 0 takes the likeliest token"
    )
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="tokens of a response, at most")
    parser.add_argument("--reward", metavar="FUNCTION", help="package.module:function, in place of metrics.eval_reward")
    parser.add_argument("--threshold", type=float, metavar="X", help="the least score that is right (default 1)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where results go (default RUN/eval/NAME)")
    parser.add_argument("--nproc", metavar="N", type=positive, help="ranks on this host, as for `hybridflow train`")
    parser.add_argument("--hostfile", metavar="HOSTS", help="a file of hosts, as for `hybridflow launch`")
    parser.add_argument("--nnodes", metavar="N | MIN:MAX", help="hosts of --hostfile to use")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of all errors")
    parser.add_argument("--version", action="version", version=__version__)
    options = parser.parse_intermixed_args(arguments)
    try:
        source, written = _written(options)
    except UserError as error:
        print_error(error, "hybridflow.cli.evaluate")
        return 1
    given = [str(written), "--evaluate", str(source)]
    for option in ("nproc", "hostfile", "nnodes"):
        value = getattr(options, option)
        given += [] if value is None else [f"--{option}", str(value)]
    return train.main([*given, *["--debug"] * options.debug])


def _written(options: Namespace) -> tuple[Path, Path]:
    """The config that the evaluation goes by, and what was made of it. Errors: UserError."""
    configs = [word for word in options.words if "=" not in word]
    overrides = [word for word in options.words if "=" in word]
    if len(configs) > 1:
        raise ConfigError(f"{' '.join(configs)}: give one config")
    if configs:
        use_variables(read_tree(configs[0], overrides))
    found = evaluated_model(options.model, options.checkpoint, base=options.base)
    source, tree = _config(found, options, configs, overrides)
    if options.data and isinstance(data := tree.get("data"), dict):  # other rows do not change how prompts are read
        from hybridflow.data.first_rows import rendered_in_training  # it loads numpy and more

        tree = {**tree, "data": {**data, "chat_template": rendered_in_training(data)}}
    output = options.output or _output(found, tree)
    made = evaluation_tree(
        tree,
        model=found.model,
        name=output.name,
        output_dir=str(output.parent),
        sets=dict(map(named_set, options.data)),
        adapter=found.adapter,
        samples=options.samples,
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        reward=options.reward,
        threshold=options.threshold,
    )
    file = output / CONFIG
    _check(made, file, source, named=bool(configs))
    return source, _write(file, as_yaml(made))


def _check(made: dict[str, Any], file: Path, source: Path, *, named: bool) -> None:
    """Nothing is written where the evaluation could not begin. named: the config is. Errors: UserError."""
    if file.is_file() and (before := _named(read_tree(file).get("actor", {}))) != _named(made["actor"]):
        raise RunDirError(f"{file.parent}: has the evaluation of another model, {before}: give --output DIR")
    fetch_models(made, weights=True)
    search_beside(source)
    config = read_config(with_neutral(made), file)
    from hybridflow.cli.refusals import note_missing  # torch loads for seconds

    reasons = Reasons()
    note_missing(config, reasons)
    if not named and any("cannot import" in line for line in reasons.lines):
        reasons.lines.append("functions beside a config are found if the config is named: hybridflow eval RUN CONFIG")
    reasons.refuse()


def _named(actor: Mapping[str, Any]) -> str:
    """The model of an evaluation, with its adapters."""
    lora = actor.get("lora")
    return str(actor.get("model")) + (f" with {lora.get('adapter_path')}" if isinstance(lora, dict) else "")


def evaluated_model(given: str, checkpoint: int | None, *, base: str | None = None) -> EvaluatedModel:
    """What a word of the command line names. base: as the option. Errors: RunDirError, ConfigError."""
    path = Path(given)
    found = _evaluated(path, given, checkpoint)
    if found.adapter is not None:
        return replace(found, model=_base(Path(found.adapter), base))
    if base is not None:
        raise ConfigError(f"--base {base}: {found.model} holds no adapters of a base model")
    return found


def _base(adapter: Path, given: str | None) -> str:
    """A directory, or a name on the Hub. Errors: ConfigError."""
    from hybridflow.convert.adapted import base_directory, base_named  # torch loads for a second

    if given is not None and is_hub_name(given):
        return given
    directory = base_directory(adapter, given, key="RUN_OR_MODEL")
    base = "" if given is not None else base_named(adapter, key="RUN_OR_MODEL")
    return base if is_hub_name(base) else str(directory)


def _evaluated(path: Path, given: str, checkpoint: int | None) -> EvaluatedModel:
    step = path.parent if path.name == "actor" else path
    if (step / MANIFEST).is_file():
        return _of_checkpoint(step.resolve().parents[1], step)
    if (path / CONFIG).is_file() and not (path / "config.json").is_file():
        return _of_run(path, checkpoint)
    if checkpoint is not None:
        raise RunDirError(f"--checkpoint {checkpoint}: {given} is no run: a run's directory has a {CONFIG}")
    if holds_adapter(path):
        run = run_of_model(path)
        return EvaluatedModel(str(path), path.resolve().name, run, adapter=str(path))
    if (path / "config.json").is_file():
        return EvaluatedModel(given, path.resolve().name, run_of_model(path))
    if path.parent.is_dir() and any(path.parent.glob(f"*/{CONFIG}")):
        raise RunDirError(f"{given}: no such run; {path.parent} has others")
    if is_hub_name(given):
        directory = fetched(given, "RUN_OR_MODEL")
        adapter = directory if holds_adapter(Path(directory)) else None
        return EvaluatedModel(given, re.sub(r"[^\w.-]+", "--", given), None, adapter=adapter)
    raise RunDirError(
        f"{given}: is neither a run's directory nor a model's, and no name on the Hub such as openai/gsm8k"
        f"{gguf_hint(path)}"
    )


def _of_run(run: Path, checkpoint: int | None) -> EvaluatedModel:
    """The last checkpoint, which is no older than hf/; of a run without checkpoints hf/."""
    there = steps(run / CHECKPOINTS)
    if checkpoint is not None and checkpoint not in there:
        known = f"there are {', '.join(map(str, there))}" if there else "the run has none"
        raise RunDirError(f"--checkpoint {checkpoint}: {run} has no checkpoint after this iteration; {known}")
    if there:
        return _of_checkpoint(run, run / CHECKPOINTS / step_name(there[-1] if checkpoint is None else checkpoint))
    if (run / "hf" / "config.json").is_file():
        return EvaluatedModel(str(run / "hf"), "hf", run)
    raise RunDirError(f"{run}: has neither a checkpoint nor a trained model in hf/")


def _of_checkpoint(run: Path, step: Path) -> EvaluatedModel:
    lacking = damage(step, read_manifest(step).files, thorough=False)
    if lacking:
        raise CheckpointError("; ".join(lacking))
    if not (step / "actor").is_dir():
        raise RunDirError(f"{step}: has no actor, which would generate")
    actor = str(step / "actor")
    return EvaluatedModel(actor, step.resolve().name, run, adapter=actor if holds_adapter(step / "actor") else None)


def _config(
    found: EvaluatedModel, options: Namespace, configs: list[str], overrides: list[str]
) -> tuple[Path, dict[str, Any]]:
    """Which file says how, and what it says of the model. Errors: UserError."""
    source, tree = _named_config(found, options, configs)
    tree = with_overrides(tree, found.model, _recorded(found), adapted=found.adapter is not None)
    return source, _with(tree, overrides)


def _recorded(found: EvaluatedModel) -> dict[str, Any]:
    """The `hf_overrides` that adapters were trained with. Errors: CheckpointError."""
    if found.adapter is None:
        return {}
    from hybridflow.architecture.peft_directory import recorded_overrides  # torch loads for a second

    return recorded_overrides(Path(found.adapter))


def _named_config(found: EvaluatedModel, options: Namespace, configs: list[str]) -> tuple[Path, dict[str, Any]]:
    if configs:
        return Path(configs[0]), read_tree(configs[0])
    source = None if found.run is None else found.run / CONFIG
    if source is not None and isinstance((tree := read_tree(source)).get("sampling"), dict):
        return source, tree
    if not options.data:
        what = "no run" if source is None else f"a run on fixed data ({source})"
        raise ConfigError(f"{options.model}: is of {what}: give a CONFIG, or --data FILE and --reward FUNCTION")
    if options.reward is None:
        raise ConfigError("--data without a CONFIG needs --reward FUNCTION, such as hybridflow.rewards:numeric_match")
    return source or Path(CONFIG), _bare(found, options)


def _bare(found: EvaluatedModel, options: Namespace) -> dict[str, Any]:
    """Of a model alone: its chat template, and lengths that it takes."""
    directory = Path(fetched(found.model, "RUN_OR_MODEL"))
    spec = spec_that_talks(directory, _recorded(found))
    by_template, arguments = prompts_of_run(found.run or directory)
    from hybridflow.data.first_rows import hold_conversations  # it loads numpy and more

    if by_template is None or (not by_template and any(hold_conversations(named_set(x)[1], {}) for x in options.data)):
        from hybridflow.data.tokenizers import load_tokenizer  # it loads transformers, for seconds

        by_template = load_tokenizer(directory).chat_template is not None
    how = "by the chat template" if by_template else "as texts, without a chat template"
    print(f"prompts are read {how}; data.chat_template={str(not by_template).lower()} changes it", flush=True)
    tree = bare_tree(
        max_positions=spec.max_positions,
        max_tokens=options.max_tokens or MAX_TOKENS,
        chat_template=by_template,
        chat_template_kwargs=arguments,
    )
    if found.run is not None and found.adapter is not None:  # the base model's config.json lacks the run's positions
        tree["actor"]["hf_overrides"] = read_tree(found.run / CONFIG).get("actor", {}).get("hf_overrides")
    return tree


def _with(tree: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(as_yaml(tree))
        file.flush()
        return read_tree(file.name, overrides)


def named_set(given: str) -> tuple[str, Any]:
    """`NAME=FILE`, or a file, which is called by the beginning of its name. Errors: ConfigError."""
    name, equals, files = given.partition("=")
    if not equals or not SET_NAME.fullmatch(name):
        name, files = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(given).name.partition(".")[0]), given
    return name, read_value(files, f"--data {given}")


def _output(found: EvaluatedModel, tree: Mapping[str, Any]) -> Path:
    root = found.run if found.run is not None else Path(str(tree.get("output_dir", "."))).expanduser()
    return root / EVALUATIONS / found.name


def _write(file: Path, text: str) -> Path:
    """Whole or not at all: under torchrun every rank writes the same. Errors: ConfigError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=".config.")
        with os.fdopen(descriptor, "w", encoding="utf-8") as written:
            written.write(text)
        Path(name).chmod(0o644)
        os.replace(name, file)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from error
    return file


if __name__ == "__main__":
    sys.exit(main())
