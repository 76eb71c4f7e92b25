"""Whether a host can read what a config names: models, tokenizer, prompts, the user's functions; and their digests.

Of weights only the headers are read, of prompt files the first rows. What is small enough gets a digest, so that hosts
with copies of their own can be compared.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hybridflow.architecture.spec import ModelSpec, read_spec
from hybridflow.architecture.weight_files import open_checkpoint
from hybridflow.architecture.weights import model_weights
from hybridflow.config import ExperimentConfig
from hybridflow.config.data import DataFiles
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.config.kinds import AnyConfig
from hybridflow.data.digests import class_digests, function_digests
from hybridflow.data.environment import check_environment
from hybridflow.data.fields import rename_fields
from hybridflow.data.first_rows import renders
from hybridflow.data.fixed_inputs import load_rows
from hybridflow.data.prompt_texts import prompt_text
from hybridflow.data.rows import Row, RowError, attempt
from hybridflow.data.same_tokens import check_tokenizers
from hybridflow.data.sources import open_files
from hybridflow.data.templates import ChatTemplate, TemplateOptions
from hybridflow.data.tokenizers import load_tokenizer, tokenizer_digest, unlike_its_file
from hybridflow.errors import CheckpointError, UserError
from hybridflow.inspection.findings import Finding
from hybridflow.parallel.agreement import digest_bytes, digest_files
from hybridflow.parallel.ranks import counted
from hybridflow.rewards.specs import pool_specs

AREA = "inputs"
NUM_ROWS = 64  # of a prompt file, that are read and checked
THERE = "make it readable on that host under this very path: a shared file system, or a copy of the same files"
Inspected = tuple[str, dict[str, str]]  # what to show, and digests by name


def input_findings(config: AnyConfig, host: str) -> tuple[list[Finding], dict[str, str]]:
    """Findings, and the digests of what has to be the same on every host."""
    tokenizers: list[PreTrainedTokenizerBase] = []
    findings, digests = [], {"the config": digest_bytes(config.to_yaml().encode()).hex()}
    for name, advice, inspect in _inspections(config, tokenizers):
        try:
            value, found = inspect()
        except UserError as error:
            findings.append(Finding(AREA, name, host, str(error), "fail", advice=advice))
            continue
        digests |= found
        findings.append(Finding(AREA, name, host, value))
    return findings, digests


def _inspections(
    config: AnyConfig, tokenizers: list[PreTrainedTokenizerBase]
) -> Iterator[tuple[str, str, Callable[[], Inspected]]]:
    """(name, advice, what to do); the tokenizer, once it is there, serves the prompts."""
    models: dict[str, list[str]] = {}
    for name, role in config.roles().items():
        models.setdefault(role.model, []).append(name)
    for path, roles in models.items():
        yield f"model of {', '.join(roles)}", THERE, partial(_model, Path(path))
    yield "tokenizer", THERE, partial(_tokenizer, Path(config.trained.model), tokenizers)
    if len(config.roles()) > 1:
        yield "tokenizers", "take models that read the same tokens", partial(_same_tokens, config)
    files = config.data.files_by_key
    if isinstance(config, FixedDataConfig):
        for key, file in files.items():
            if tokenizers:
                yield key, THERE, partial(_examples, key, file, config, tokenizers)
        return
    for key, file in files.items():
        if tokenizers or config.data.chat_template is False:
            yield key, THERE, partial(_prompts, key, file, config, tokenizers)
    if config.data.environment is not None:
        where = "put its file beside the config or into PYTHONPATH on that host, and what it imports with it"
        yield config.data.environment.field, where, partial(_environment, config)
    names = _functions(config)
    if names:
        where = "put its file beside the config or into PYTHONPATH on that host, and what it imports with it"
        yield f"functions {', '.join(names)}", where, partial(_user_functions, config)


def _model(path: Path) -> Inspected:
    spec = read_spec(path)
    weights = open_checkpoint(path, spec)
    lacking = [name for name in _names(spec) if name not in weights]
    if lacking:
        raise CheckpointError(f"{path}: no tensor {lacking[0]}, and {len(lacking) - 1} more that config.json asks for")
    files = {weights.file_of(name) for name in _names(spec)}
    size = sum(file.stat().st_size for file in files)
    digest = digest_files([path / "config.json"], path).hex()
    return f"{path}: {counted(len(files), 'file')} of weights, {size / 1e9:,.2f} GB", {f"config.json of {path}": digest}


def _names(spec: ModelSpec) -> list[str]:
    return [name for weight in model_weights(spec, spec.head) for name in weight.hf]


def _tokenizer(path: Path, tokenizers: list[PreTrainedTokenizerBase]) -> Inspected:
    if not path.is_dir():  # transformers would take it for the name of a repository
        raise CheckpointError(f"{path}: no such directory")
    tokenizers.append(load_tokenizer(path))
    note = unlike_its_file(path, tokenizers[0])
    line = f"{path}: {len(tokenizers[0]):,} tokens" + ("" if note is None else f"; {note}")
    return line, {f"the tokenizer of {path}": tokenizer_digest(path).hex()}


def _same_tokens(config: AnyConfig) -> Inspected:
    return "; ".join(check_tokenizers(config)) or "one for all models", {}


def _prompts(
    key: str, named_files: DataFiles, config: ExperimentConfig, tokenizers: list[PreTrainedTokenizerBase]
) -> Inspected:
    data, files = config.data, open_files(named_files, key)
    texts = data.chat_template is not None or data.environment is not None
    options = TemplateOptions(data.chat_template_kwargs, data.message_format, texts=texts)
    by_template = renders(data, files if key == "data.train" else open_files(data.train, "data.train"))
    template = ChatTemplate(tokenizers[0], options) if by_template else None

    def check(row: Row) -> None:
        if row.problem is not None:
            raise row.problem
        own = rename_fields(row, data.columns)
        if data.environment is None or not data.environment.begins_rows:
            prompt_text(own, data.prompt_key, template)

    rows = files.rows_at(range(min(len(files), NUM_ROWS)))
    for found in (attempt(check, row) for row in rows):
        if isinstance(found, RowError) and data.bad_rows == "error":
            raise found
    return f"{', '.join(files.names)}: the first {len(rows)} rows are readable", {key: files.digest.hex()}


def _examples(
    key: str, named_files: DataFiles, config: FixedDataConfig, tokenizers: list[PreTrainedTokenizerBase]
) -> Inspected:
    vocab_size = read_spec(config.trained.model).vocab_size
    found = load_rows(named_files, tokenizers[0], config, vocab_size, key=key, checked_bytes=0)
    rows = found.draw(found.order(0, False), min(NUM_ROWS, len(found))).items
    names = ", ".join(found.rows.files.names)
    return f"{names}: the first {len(rows)} rows are readable", {key: found.digest.hex()}


def _environment(config: ExperimentConfig) -> Inspected:
    found, environment = check_environment(config), config.data.environment
    assert found is not None and environment is not None, "the config has one"
    tools = "" if environment.is_agent else f", tools: {', '.join(found.tools) or 'none'}"
    digests = class_digests(environment.path, found.file)
    return f"can be imported{tools}", {name: digest.hex() for name, digest in digests.items()}


def _functions(config: ExperimentConfig) -> list[str]:
    named = [function.function for function in (config.reward.functions if config.reward else ())]
    named += [config.metrics.eval_reward.function] if config.metrics.eval_reward else []
    flow = getattr(config.algorithm, "flow", None)
    return list(dict.fromkeys([*named, *([flow] if flow else [])]))


def _user_functions(config: ExperimentConfig) -> Inspected:
    return "can be imported", {
        name: digest.hex() for name, digest in function_digests(config, pool_specs(config)).items()
    }
