"""Why a config cannot be trained here: all reasons at once, the same for `hybridflow plan` and `hybridflow train`.

    check_here(config, world_size)        layouts, models, files, columns, functions; keys: `files_of_tree.read_config`

Nothing is built, and no weights are read. Errors: ConfigError with a line a reason.

The number of ranks of this host that a run is started on is chosen here too.
"""

import glob
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybridflow.architecture.spec import read_spec
from hybridflow.architecture.weight_files import check_score_head
from hybridflow.config import ExperimentConfig
from hybridflow.config.algorithms import Custom
from hybridflow.config.auto import autos
from hybridflow.config.data import DataFiles, SourceConfig, is_tasks, sources_of
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.config.kinds import AnyConfig
from hybridflow.config.reasoning_gym import KEY
from hybridflow.config.world_size import TRIED, world_size_to_try
from hybridflow.data.copies import is_remote
from hybridflow.data.fields import rename_fields
from hybridflow.data.messages import is_conversation
from hybridflow.data.rows import Row, RowError, attempt
from hybridflow.data.same_tokens import check_tokenizers, tokenizer_notes
from hybridflow.data.sources import data_files, fetch, open_files
from hybridflow.data.tokenizers import has_tokenizer, load_tokenizer
from hybridflow.errors import ConfigError, DataError, Reasons, RewardError, remedy
from hybridflow.inspection.attention import check_heads
from hybridflow.parallel.device import num_devices
from hybridflow.parallel.host_memory import host_memory
from hybridflow.parallel.platform import prepare_imports
from hybridflow.parallel.torchrun import host_name
from hybridflow.placement.host_bytes import check_host_memory
from hybridflow.placement.hosts import HostRanks
from hybridflow.placement.placed import check_models, check_output_dir, place
from hybridflow.rewards.specs import check_columns, check_row, pool_specs
from hybridflow.user_code import load_function, search_beside

NUM_ROWS = 16  # whose columns are looked at
MOST_BYTES = 256 << 20  # of the files whose columns are looked at; the run checks larger ones as it reads them
TOKENIZER, CODE = "the tokenizer", "code"  # of what is not on this machine, see `_elsewhere`
WEIGHTS = ("*.safetensors", "pytorch_model*.bin", ".metadata")
# the fields that a row of each kind has, in the ways that it may have them
FIELDS = {
    "sft": (("messages",), ("prompt", "completion")),
    "pairs": (("chosen", "rejected"),),
    "labelled": (("prompt", "completion", "label"),),
}


def check_here(
    config: AnyConfig, world_size: int, *, output: bool = False, reads: bool = True, ranks: range | None = None
) -> None:
    """Whether a run with this config could begin on this machine. Errors: ConfigError with a line a reason.

    output: also whether the run directory can be written. reads: also by the tokenizer, and by names of weights.
    ranks: those of this host; with `reads` also whether the host has the memory that optimizers and saves take of it.
    """
    reasons = Reasons()
    run = reasons.collect(place, config, world_size)
    if reads and run is not None and ranks is not None:
        reasons.collect(check_host_memory, run, HostRanks(host_name(), ranks), host_memory()[0])
    note_missing(config, reasons, reads=reads)
    if output:
        reasons.collect(check_output_dir, config)
    reasons.refuse()


def note_missing(
    config: AnyConfig, reasons: Reasons, *, reads: bool = True, elsewhere: Collection[str] = (), here: bool = True
) -> None:
    """Note what the config names and this machine lacks, beside models' sizes. reads: see `check_here`.

    elsewhere: keys of what is not looked at, see `_elsewhere`. here: whether the run has this machine's device.
    """
    if isinstance(config, ExperimentConfig) and here and not reasons.lines:
        reasons.collect(check_heads, config)
    if not reasons.lines:  # of a model that cannot be read nothing new is said
        reasons.collect(check_tokenizers, config)
    files = (
        {} if CODE in elsewhere else {k: named for k, named in config.data.files_by_key.items() if k not in elsewhere}
    )
    for key, named in files.items():
        reasons.collect(_check_rows, key, named, config)
    if isinstance(config, ExperimentConfig) and CODE not in elsewhere:
        reasons.collect(pool_specs, config)
        if config.data.environment is not None:
            from hybridflow.data.environment import check_environment  # it loads transformers, for seconds

            reasons.collect(check_environment, config)
        if isinstance(config.algorithm, Custom):
            reasons.collect(load_function, config.algorithm.flow, "algorithm.flow")
    if reads and not reasons.lines:
        _note_weights(config, reasons)
        if TOKENIZER not in elsewhere:
            _note_unreadable(config, reasons, files)


def check_for_hosts(config: AnyConfig) -> list[str]:
    """What the config names and this machine does not have, a line each: nothing of it was read.

    Errors: ConfigError for what is here and cannot be trained with, a line a reason, as `check_here`.
    """
    elsewhere, reasons = _elsewhere(config), Reasons()
    note_missing(config, reasons, elsewhere=elsewhere, here=config.platform != "auto")
    reasons.refuse()
    rows = f", nor were the rows of {', '.join(config.data.files_by_key)}, which it reads"
    return [
        f"not on this machine, and not read{rows if key == CODE else ''}: {name}; the hosts must have it"
        for key, names in elsewhere.items()
        for name in names
    ]


def _elsewhere(config: AnyConfig) -> dict[str, list[str]]:
    """What is not on this machine, as a person reads it, by the key of the config, or `CODE`."""
    found: dict[str, list[str]] = {}
    for key, files in config.data.files_by_key.items():
        paths = [source.path for source in sources_of(files) if isinstance(source, SourceConfig)]
        absent = [path for path in paths if not (is_remote(path) or Path(path).exists() or glob.glob(path))]
        lacks_tasks = is_tasks(files) and find_spec(KEY) is None
        found[key] = [f"{key} = {path}" for path in absent] + [f"the package {KEY} of {key}"] * lacks_tasks
    for name, role in config.roles().items():
        model = Path(role.model)
        if model.parent.name != "snapshots" and not _has_weights(model):  # of the Hub's cache a run fetches them
            found[f"{name}.model"] = [f"the weights of {name}.model = {model}"]
    if not has_tokenizer(Path(config.trained.model)):
        found[TOKENIZER] = [f"the tokenizer of {config.trained_name}.model = {config.trained.model}"]
    if isinstance(config, ExperimentConfig):
        found[CODE] = [f"{key} = {text}" for key, text in _named_code(config).items() if not _is_found(text)]
    return {key: names for key, names in found.items() if names}


def _named_code(config: ExperimentConfig) -> dict[str, str]:
    """The user's functions and classes, `package.module:name`, and the Python of verifiers, by key."""
    scoring, judge, environment = config.reward, config.metrics.eval_reward, config.data.environment
    functions = scoring.functions if scoring is not None else ()
    found: dict[str, Any] = {f"reward.functions.{i}.function": each.function for i, each in enumerate(functions)}
    found["metrics.eval_reward"] = None if judge is None else judge.function
    found["algorithm.flow"] = config.algorithm.flow if isinstance(config.algorithm, Custom) else None
    for name in ("class", "agent", "python"):
        found[f"data.environment.{name}"] = getattr(environment, name, None)
    return {key: text for key, text in found.items() if text is not None}


def _is_found(text: str) -> bool:
    """Whether the package of `package.module:name`, or a file, is on this machine."""
    package, is_code, _ = text.partition(":")
    return find_spec(package.partition(".")[0]) is not None if is_code else Path(text).exists()


def check_before_search(config: AnyConfig) -> list[str]:
    """What `missing_here` says. Errors: ConfigError with all reasons that no layout mends, a line each."""
    missing = missing_here(config)
    reasons = Reasons()
    check_models(config, reasons)
    if not missing:
        note_missing(config, reasons)
    reasons.refuse()
    return missing


def _note_weights(config: AnyConfig, reasons: Reasons) -> None:
    """Note what the ranks would refuse as they read headers of weights."""
    from hybridflow.inspection.inputs import check_weights, heads_of  # it loads transformers, for seconds

    roles: dict[Path, list[str]] = {}
    for name, role in config.roles().items():
        roles.setdefault(Path(role.model), []).append(name)
    for path, names in roles.items():
        if _has_weights(path):  # of the Hub's cache a run fetches what is missing
            reasons.collect(check_weights, path, heads_of(names))
            for name in names:
                if name.startswith("reward.models"):
                    reasons.collect(check_score_head, name, read_spec(path))


def _note_unreadable(config: AnyConfig, reasons: Reasons, files: Mapping[str, DataFiles]) -> None:
    """Note what the ranks would refuse as they read the tokenizer, and rows by it.

    files: those on this machine, by key.
    """
    from hybridflow.data.inputs import check_ends  # both load transformers, for seconds
    from hybridflow.inspection.inputs import first_rows

    tokenizer = reasons.collect(load_tokenizer, Path(config.trained.model))
    if tokenizer is None:
        return
    reasons.collect(tokenizer_notes, config, tokenizer)
    if isinstance(config, ExperimentConfig):
        reasons.collect(check_ends, config, tokenizer, read_spec(config.trained.model).vocab_size)
    most = min(MOST_BYTES, config.data.checked_bytes)  # rows of larger files are checked as they are used
    if "data.train" in files and _num_bytes(files["data.train"], "data.train") > most:
        return  # whose first row says whether a template renders
    for key, named in files.items():
        if _num_bytes(named, key) <= MOST_BYTES:
            reasons.collect(first_rows, key, config, tokenizer, num_rows=NUM_ROWS)


def missing_here(config: AnyConfig) -> list[str]:
    """Why a config of sizes alone cannot be trained here, a line each; empty for a config whose models have weights.

    Sizes alone are models of a config.json without weights, as configs/shapes/ has them.
    """
    models = {role.model: Path(role.model) for role in config.roles().values()}
    bare = [
        name
        for name, path in models.items()
        if (path / "config.json").is_file()
        and path.parent.name != "snapshots"  # of the Hub's cache: a run fetches what is missing
        and not _has_weights(path)
    ]
    if not bare:
        return []
    reasons = Reasons()
    reasons.lines.append(f"no weights in {', '.join(bare)}")
    note_missing(config, reasons, reads=False)
    if len(reasons.lines) == 1 and has_tokenizer(Path(config.trained.model)):
        _note_weights(config, reasons)
        _note_unreadable(config, reasons, config.data.files_by_key)
    return list(dict.fromkeys(reasons.lines))


def _has_weights(model: Path) -> bool:
    return any(any(model.glob(pattern)) for pattern in WEIGHTS)


def _num_bytes(files: DataFiles, key: str) -> int:
    return sum(file.stat().st_size for file in data_files(files, key))


def _check_rows(key: str, files: DataFiles, config: AnyConfig) -> None:
    """Errors: DataError for a file or data set that is not there, and for first rows that lack a column."""
    fetch(files, key)
    if _num_bytes(files, key) > MOST_BYTES:
        return
    rows = open_files(files, key)
    first = rows.rows_at(range(min(len(rows), NUM_ROWS)))
    found = [attempt(lambda row: _check_columns(row, key, config), row) for row in first]
    wrong = [error for error in found if isinstance(error, RowError)]
    if wrong and (config.data.bad_rows == "error" or len(wrong) == len(first)):
        some = len(wrong) < len(first)
        raise DataError(f"{wrong[0]}{remedy({'data.bad_rows': ['drop'] if some else []})}")


def _check_columns(row: Row, key: str, config: AnyConfig) -> None:
    if row.problem is not None:
        raise row.problem
    fields = rename_fields(row, config.data.columns).fields
    if isinstance(config, FixedDataConfig):
        ways = FIELDS[config.algorithm.kind]
        if any(set(way) <= fields.keys() for way in ways):
            return
        lacking = [name for name in ways[-1] if name not in fields]
        wanted, hint = f"field {lacking[0]!r}", "; data.columns says which of them stands for it"
        talks = [name for name in fields if ways[0] == ("messages",) and is_conversation(fields[name])]
        if talks:
            first = next(iter(fields[talks[0]]), None)
            form = " data.message_format=sharegpt" * (isinstance(first, dict) and "from" in first)
            wanted, hint = "field 'messages'", f". A conversation is data.columns.messages={talks[0]}{form}"
    else:
        environment = config.data.environment
        if config.data.prompt_key in fields or (environment is not None and environment.begins_rows):
            try:
                check_columns(config, [name for name in fields if name != config.data.prompt_key], row.where)
                check_row(config, key, fields)
            except RewardError as error:
                raise RowError(str(error), "no column") from error
            except ValueError as error:
                raise RowError(f"{row.where}: {error}", "nothing to score by") from error
            return
        hint = f"; data.prompt_key={next(iter(fields), 'NAME')}, or data.columns, says which of them is the prompt"
        wanted = f"key {config.data.prompt_key!r} (data.prompt_key)"
    raise RowError(f"{row.where}: has no {wanted}; its fields are {', '.join(fields) or 'none'}{hint}", "no column")


def number_of_ranks(
    tree: dict[str, Any], config: AnyConfig, source: str | Path, given: int | None, *, trains: bool = True
) -> int:
    """As given; else all GPUs of this host, or on CPUs the fewest that fit.

    config: of the tree, with neutral values for `auto`. trains: whether the run has optimizers.
    Errors: ConfigError with all reasons why the run cannot begin on that many, and on how many it could.
    """
    prepare_imports(config.platform)
    search_beside(source)
    wanted, none_fits = given or num_devices(), False
    if autos(tree):
        config, wanted = fitting(tree, source, wanted)
    elif wanted is None:
        wanted, problem = world_size_to_try(config)
        none_fits = problem is not None
    try:
        check_here(config, wanted, output=True, ranks=range(wanted) if trains else None)
    except ConfigError as error:
        first = f"no number of ranks fits; on {wanted}, the least that the grids need:\n" if none_fits else ""
        raise ConfigError(f"{first or _other_number(config, source, wanted)}{error}") from error
    return wanted


def _other_number(config: AnyConfig, source: str | Path, wanted: int) -> str:
    """A line to begin with where the number of ranks is what is wrong."""
    try:
        config.check_world_size(wanted)
    except ConfigError:
        least, problem = world_size_to_try(config)
        if problem is None:
            many = f"needs {least} rank{'s' * (least > 1)} (or a multiple), got {wanted}"
            return f"{many}: hybridflow train {source} --nproc {least}\n"
    return ""


def fitting(tree: dict[str, Any], source: str | Path, wanted: int | None) -> tuple[AnyConfig, int]:
    """A config whose `auto` is resolved, for so many ranks or for the smallest number on which something fits."""
    from hybridflow.trainers.auto import resolved_for

    for count in [wanted] if wanted else TRIED:
        try:
            return resolved_for(tree, source, count)[0], count
        except ConfigError:
            if wanted or count == TRIED[-1]:
                raise
    raise AssertionError("the last that is tried tells why it does not fit")
