"""Whether a host can read what a config names: models, tokenizer, prompts, the user's functions; and their digests.

Of weights only the headers are read, of prompt files the first rows. What is small enough gets a digest, so that hosts
with copies of their own can be compared.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hybridflow.architecture.spec import Head, read_spec
from hybridflow.architecture.tables import VALUE_HEAD
from hybridflow.architecture.weight_files import open_checkpoint
from hybridflow.architecture.weights import model_weights
from hybridflow.config import ExperimentConfig
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.config.kinds import AnyConfig
from hybridflow.data.digests import class_digests, function_digests
from hybridflow.data.environment import check_environment
from hybridflow.data.fixed_inputs import first_examples
from hybridflow.data.inputs import first_prompts
from hybridflow.data.same_tokens import check_tokenizers
from hybridflow.data.sources import Files
from hybridflow.data.tokenizers import load_tokenizer, tokenizer_digest, unlike_its_file
from hybridflow.errors import CheckpointError, UserError
from hybridflow.inspection.findings import Finding
from hybridflow.parallel.agreement import digest_bytes, digest_files
from hybridflow.parallel.ranks import counted
from hybridflow.placement.placed import head_of
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
        yield f"model of {', '.join(roles)}", THERE, partial(_model, Path(path), roles)
    yield "tokenizer", THERE, partial(_tokenizer, Path(config.trained.model), tokenizers)
    if len(config.roles()) > 1:
        yield "tokenizers", "take models that read the same tokens", partial(_same_tokens, config)
    for key in config.data.files_by_key:
        if tokenizers:
            yield key, THERE, partial(_rows, key, config, tokenizers)
    if isinstance(config, FixedDataConfig):
        return
    if config.data.environment is not None:
        where = "put its file beside the config or into PYTHONPATH on that host, and what it imports with it"
        yield config.data.environment.field, where, partial(_environment, config)
    names = _functions(config)
    if names:
        where = "put its file beside the config or into PYTHONPATH on that host, and what it imports with it"
        yield f"functions {', '.join(names)}", where, partial(_user_functions, config)


def heads_of(roles: Sequence[str]) -> list[Head]:
    """The heads that one model has in these roles, each once."""
    return list(dict.fromkeys(map(head_of, roles)))


def check_weights(path: Path, heads: Collection[Head]) -> set[Path]:
    """The files of a model's weights, whose headers alone are read. heads: those that the roles of a run give it.

    Errors: CheckpointError for a missing tensor. Only a value head may be missing, which a run makes.
    """
    spec = read_spec(path)
    weights = open_checkpoint(path, spec)
    needed = [weight for head in heads for weight in model_weights(spec, head) if weight != VALUE_HEAD]
    names = list(dict.fromkeys(name for weight in needed for name in weight.hf))
    lacking = [name for name in names if name not in weights]
    if lacking:
        more = f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise CheckpointError(f"{path}: no tensor {lacking[0]}{more} that config.json asks for")
    return {weights.file_of(name) for name in names}


def _model(path: Path, roles: Sequence[str]) -> Inspected:
    files = check_weights(path, heads_of(roles))
    size = sum(file.stat().st_size for file in files)
    digest = digest_files([path / "config.json"], path).hex()
    return f"{path}: {counted(len(files), 'file')} of weights, {size / 1e9:,.2f} GB", {f"config.json of {path}": digest}


def _tokenizer(path: Path, tokenizers: list[PreTrainedTokenizerBase]) -> Inspected:
    if not path.is_dir():  # transformers would take it for the name of a repository
        raise CheckpointError(f"{path}: no such directory")
    tokenizers.append(load_tokenizer(path))
    note = unlike_its_file(path, tokenizers[0])
    line = f"{path}: {len(tokenizers[0]):,} tokens" + ("" if note is None else f"; {note}")
    return line, {f"the tokenizer of {path}": tokenizer_digest(path).hex()}


def _same_tokens(config: AnyConfig) -> Inspected:
    return "; ".join(check_tokenizers(config)) or "one for all models", {}


def _rows(key: str, config: AnyConfig, tokenizers: list[PreTrainedTokenizerBase]) -> Inspected:
    files, num_read = first_rows(key, config, tokenizers[0], num_rows=NUM_ROWS)
    return f"{', '.join(files.names)}: the first {num_read} rows are readable", {key: files.digest.hex()}


def first_rows(key: str, config: AnyConfig, tokenizer: PreTrainedTokenizerBase, *, num_rows: int) -> tuple[Files, int]:
    """The files of a key, and how many of their first rows could be read as a run reads them. Errors: UserError."""
    vocab_size = read_spec(config.trained.model).vocab_size
    if isinstance(config, FixedDataConfig):
        return first_examples(key, config, tokenizer, vocab_size, num_rows=num_rows)
    return first_prompts(key, config, tokenizer, vocab_size, num_rows=num_rows)


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
