"""The environments of a run, put together from what it has read, and what they say is right.

`data.environment.tool_parser` is tried on a call that the model's chat template writes. A parser of another model finds
no call in that text, and a run would never call a tool.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from hybridflow.agents.sessions import Agents
from hybridflow.config import ExperimentConfig
from hybridflow.data.continuations import Continuations
from hybridflow.data.environment import AgentInputs
from hybridflow.data.inputs import Inputs
from hybridflow.data.messages import Message
from hybridflow.data.response_text import ResponseTexts
from hybridflow.data.rows import RowError, shown
from hybridflow.environments.conversations import Environments
from hybridflow.errors import ConfigError
from hybridflow.flows.evaluate import Judge
from hybridflow.rewards.answers import answer_reader
from hybridflow.rewards.calls import FunctionCaller
from hybridflow.rewards.specs import function_names, judging_weights
from hybridflow.rollout.tool_calls import KEY, ToolCallParser, parsers_that_read

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
    """The environments or agents of the run; None where the config has no environment. vocab_size: the actor's.

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


def judge_of(config: ExperimentConfig, caller: FunctionCaller) -> Judge:
    """Who says what is right: metrics.eval_reward, the environment, or the run's reward functions."""
    right, threshold = config.metrics.eval_reward, config.metrics.eval_threshold
    read, _ = answer_reader(judging_function(config))
    if right is not None:
        assert caller.pool is not None, "eval_reward is a function"
        return Judge(len(caller.pool.specs) - 1, (), threshold, read)  # the last, see `rewards.specs`
    if config.reward_functions_judge:
        return Judge(None, (), threshold, read)
    assert config.data.environment is not None, "the config says what is right"
    return Judge(None, config.data.environment.weights, threshold, read)


def judging_function(config: ExperimentConfig) -> str | None:
    """package.module:function where one alone says what is right."""
    right = config.metrics.eval_reward
    if right is not None or config.reward is None or not config.reward_functions_judge:
        return None if right is None else right.function
    own = [function.function for function in config.reward.functions]
    return own[0] if len(own) == 1 and not config.reward.remote else None


def judge_name(config: ExperimentConfig) -> str:
    """Who says what is right, in words."""
    right, environment = config.metrics.eval_reward, config.data.environment
    if right is not None:
        return right.function
    if environment is not None:
        return f"{environment.field}, a weighted sum of parts," if environment.parts else environment.field
    assert config.reward is not None, "the reward functions of the run judge"
    scoring = config.reward
    parts = [function.parts for function in scoring.functions] + [{}] * len(scoring.remote)
    own = zip(function_names(scoring), judging_weights(scoring), parts, strict=True)
    terms = [
        f"{weight:g} x {name}{f'/{part}' if part else ''}"
        for name, weights, of in own
        for part, weight in zip(of or ("",), weights, strict=True)
        if weight
    ]
    several = "; metrics.eval_reward names one of them" if len(terms) > 1 else ""
    return f"the run's reward functions ({' + '.join(terms)}{several})"


def evaluation_notes(config: ExperimentConfig) -> list[str]:
    """What is right in evaluations, where that is not a score of 1 by metrics.eval_reward."""
    metrics = config.metrics
    if not metrics.eval_interval or (metrics.eval_reward is not None and metrics.eval_threshold == 1.0):
        return []
    return [f"evaluation: {what_is_right(config)}. eval/score_mean is the mean score that trains"]


def what_is_right(config: ExperimentConfig) -> str:
    """In evaluations."""
    metrics = config.metrics
    judge = "metrics.eval_reward" if metrics.eval_reward is not None else judge_name(config)
    return f"right is a score of {judge} of at least metrics.eval_threshold = {metrics.eval_threshold:g}"


ASKED = "hybridflow asks"
SAMPLES = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}


def unread_calls(
    continuations: Continuations,
    schema: Mapping[str, Any],
    parser: ToolCallParser,
    name: str,
    hidden: Iterable[int],
) -> str | None:
    """What is wrong with the parser `name`; None where it reads the template's call, or the template writes none.

    schema: of the tool that is called. hidden: special tokens that the text of a turn does not show.
    """
    tool, template = str(schema["function"]["name"]), continuations.template
    text = _written(continuations, schema, tool)
    if tool not in text:
        return None
    for token_id in hidden:
        text = text.replace(str(template.tokenizer.convert_ids_to_tokens(token_id)), "")
    if any(call.name == tool for call in parser.parsed(text).calls):
        return None
    others = parsers_that_read(text, tool, template.tokenizer, [schema])
    hint = f"; of vLLM's parsers these do: {', '.join(others)}" if others else "; no parser of vLLM's does"
    return (
        f"{KEY} = {name}: does not read the calls that the chat template of {template.tokenizer.name_or_path} writes, "
        f"{shown(text, 200)}{hint}"
    )


def _written(continuations: Continuations, schema: Mapping[str, Any], tool: str) -> str:
    """A turn with a call, by the template; nothing where it fails."""
    ask: list[Message] = [{"role": "user", "content": ASKED}]
    call = {"name": tool, "arguments": _arguments(schema["function"].get("parameters"))}
    calls = [{"id": continuations.call_id("call_0_0"), "type": "function", "function": call}]
    template, with_tool = continuations.template, continuations.with_tools([schema])
    try:
        arguments = with_tool.arguments({})
        text = template.whole([*ask, {"role": "assistant", "content": "", "tool_calls": calls}], KEY, arguments)
        begun = template.whole(ask, KEY, arguments, begins=True)
    except RowError:
        return ""
    return text.removeprefix(begun) if text.startswith(begun) else text.rpartition(ASKED)[2]


def _arguments(parameters: Any) -> dict[str, Any]:
    properties = parameters.get("properties", {}) if isinstance(parameters, Mapping) else {}
    return {
        name: SAMPLES.get(str(kind.get("type")), "some") if isinstance(kind, Mapping) else "some"
        for name, kind in properties.items()
    }
