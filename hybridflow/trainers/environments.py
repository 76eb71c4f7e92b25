"""The environments of a run, put together from what it has read, and what they say is right."""

from torch import Tensor, tensor

from hybridflow.batch import RolloutBatch
from hybridflow.config import ExperimentConfig
from hybridflow.data.inputs import Inputs
from hybridflow.data.response_text import ResponseTexts
from hybridflow.environments.conversations import Environments
from hybridflow.rewards.calls import FunctionCaller
from hybridflow.rollout.tool_calls import ToolCallParser


def environments_of(inputs: Inputs, rank: int) -> Environments | None:
    """None where the config has none. Errors: ConfigError where vLLM has no such parser of tool calls."""
    read, ends, tokenizer = inputs.environment, inputs.ends, inputs.tokenizer
    if read is None:
        return None
    schemas = read.pool.schemas
    parser = ToolCallParser(read.pool.config.tool_parser, tokenizer, schemas) if schemas else None
    texts = ResponseTexts.of(tokenizer, ends.ids, special_tokens="content")
    return Environments(read.pool, read.continuations, parser, texts.text, frozenset(ends.ids), rank)


def right_of(config: ExperimentConfig, caller: FunctionCaller, responses: RolloutBatch) -> int | Tensor:
    """What `flows.evaluate` takes for right: metrics.eval_reward, by its number, or (N,) an environment's rewards."""
    if config.metrics.eval_reward is not None:
        assert caller.pool is not None, "eval_reward is a function"
        return len(caller.pool.specs) - 1  # the last, see `rewards.specs`
    assert config.data.environment is not None, "the config says what is right"
    return responses.environment_rewards @ tensor(config.data.environment.weights)
