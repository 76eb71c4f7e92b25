"""--prompt-tokens and --response-tokens: what a plan or a search expects of an iteration."""

from dataclasses import replace
from typing import TypeVar

from hybridflow.automap.timing import Work
from hybridflow.config import ExperimentConfig
from hybridflow.config.fixed_data import FixedDataConfig
from hybridflow.errors import ConfigError

Kind = TypeVar("Kind", ExperimentConfig, FixedDataConfig, ExperimentConfig | FixedDataConfig)


def with_lengths(config: Kind, response_tokens: int | None) -> Kind:
    """The config with this mean response length, which sizes the KV cache. Errors: ConfigError above the longest."""
    if response_tokens is None or isinstance(config, FixedDataConfig):
        return config
    _check(response_tokens, config.sampling.max_response_length)
    sampling = config.sampling.model_copy(update={"expected_response_length": response_tokens})
    return config.model_copy(update={"sampling": sampling})


def work_with(work: Work, prompt_tokens: int | None, response_tokens: int | None) -> Work:
    """Errors: ConfigError for a mean above the longest response."""
    mean = response_tokens or work.mean
    _check(mean, work.longest)
    return replace(work, prompt=prompt_tokens or work.prompt, mean=mean)


def _check(mean: float, longest: float) -> None:
    if mean > longest:
        raise ConfigError(f"--response-tokens {mean:g}: responses have {longest:g} tokens at most")
