"""The section `data` of a config: which files, which of their columns, and what becomes of rows that do not fit."""

from typing import Literal

from pydantic import PositiveInt

from hybridflow.algorithm_config import Section


class DataConfig(Section):
    """Where prompts come from. Every other column of a line travels to the reward functions."""

    train: str
    heldout: str | None = None
    prompt_key: str = "prompt"
    chat_template: bool = False  # the prompt column holds a list of messages
    prompts_per_iteration: PositiveInt
    max_prompt_length: PositiveInt  # tokens
    overlong_prompts: Literal["drop", "error"] = "error"
    shuffle: bool = True
