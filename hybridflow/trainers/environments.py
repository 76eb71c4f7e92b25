"""The environments of a run, put together from what it has read, and what they say is right."""

import sys
from dataclasses import replace
from functools import partial

from torch import Tensor, tensor

from hybridflow.agents.sessions import Agents
from hybridflow.batch import RolloutBatch
from hybridflow.config import ExperimentConfig
from hybridflow.data.environment import AgentInputs
from hybridflow.data.inputs import Inputs
from hybridflow.data.response_text import ResponseTexts
from hybridflow.environments.conversations import Environments
from hybridflow.errors import ConfigError
from hybridflow.rewards.calls import FunctionCaller
from hybridflow.rollout.tool_calls import ToolCallParser
from hybridflow.trainers.tool_parsers import unread_calls

# stands for the tools that an agent tells later
SOME_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}


def environments_of(
    inputs: Inputs, config: ExperimentConfig, rank: int, vocab_size: int
) -> Environments | Agents | None:
    """None where the config has none. vocab_size: the actor's.

    Errors: ConfigError where vLLM has no such parser of tool calls, or that of another model.
    """
    read, ends, tokenizer = inputs.environment, inputs.ends, inputs.tokenizer
    if read is None:
        return None
    name, end_ids = read.pool.config.tool_parser, frozenset(ends.ids)
    continuations = replace(read.continuations, vocab_size=vocab_size)
    texts = ResponseTexts.from_tokenizer(tokenizer, ends.ids, special_tokens="content")
    if isinstance(read, AgentInputs):
        make_parser = partial(ToolCallParser, name, tokenizer)
        unread = unread_calls(continuations, SOME_TOOL, make_parser([SOME_TOOL]), name, texts.hidden)
        if unread is not None and rank == 0:  # an agent may have no tools
            print(f"{unread}; requests with tools would be answered without calls", file=sys.stderr, flush=True)
        return Agents(
            read.pool,
            continuations,
            make_parser,
            texts.text,
            end_ids,
            rank=rank,
            prompt_key=config.data.prompt_key,
            token=read.token,
            max_prompt_length=config.data.max_prompt_length,
            max_model_len=config.max_sequence_length,
            stop=config.sampling.stop,
        )
    schemas = read.pool.schemas
    parser = ToolCallParser(name, tokenizer, schemas) if schemas else None
    if parser is not None:
        problem = unread_calls(continuations, schemas[0], parser, name, texts.hidden)
        if problem is not None:
            raise ConfigError(problem)
    return Environments(read.pool, continuations, parser, texts.text, end_ids, rank=rank)


def right_of(config: ExperimentConfig, caller: FunctionCaller, responses: RolloutBatch) -> int | Tensor:
    """What `flows.evaluate` takes for right: the number of metrics.eval_reward, or (N,) an environment's rewards."""
    if config.metrics.eval_reward is not None:
        assert caller.pool is not None, "eval_reward is a function"
        return len(caller.pool.specs) - 1  # the last, see `rewards.specs`
    assert config.data.environment is not None, "the config says what is right"
    return responses.environment_rewards @ tensor(config.data.environment.weights)
