"""Talk to a model that a run has trained, or to any model directory:

    hybridflow chat runs/math                     line by line; /reset begins anew, /quit or Ctrl-D ends
    hybridflow chat runs/math --prompt "12+7="    one answer, on stdout alone
    hybridflow chat runs/math/adapter             adapters, merged into the base model in a temporary directory

The model of a run is that of the end of the run, in hf/. Before that end it is that of the last checkpoint.
With a chat template the model sees the whole conversation. Without a chat template each line is a prompt.
The keys data.chat_template and data.chat_template_kwargs of a run hold as in training. At temperature 0, the default,
the likeliest token is taken. Responses end at the same tokens as in training.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow import __version__
from hybridflow.checkpoint.store import CHECKPOINTS, MANIFEST, step_name, steps
from hybridflow.cli.command import argument_parser, print_error
from hybridflow.config import read_tree
from hybridflow.config.hub import fetched, is_hub_name
from hybridflow.errors import RunDirError, UserError
from hybridflow.formats.gguf_files import gguf_hint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridflow.architecture.spec import ModelSpec
    from hybridflow.data.end_tokens import EndTokens

CONFIG = "config.yaml"
ADAPTER_CONFIG, METADATA = "adapter_config.json", ".metadata"
OF_A_RUN = ("hf", "adapter")  # directories beside the run's config
MOST_LENGTH = 8192  # tokens of a conversation, where the model takes more
Message = dict[str, str]


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser("hybridflow.cli.chat", __doc__)
    parser.add_argument(
        "model",
        metavar="RUN_OR_MODEL",
        type=Path,
        help="a run's directory, a model's, one of PEFT with adapters, or a name on the Hub",
    )
    parser.add_argument(
        "--base", metavar="DIR", help="base model of adapters (default: that of their adapter_config.json)"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="answer this text and end")
    parser.add_argument(
        "--max-tokens", metavar="N", type=int, default=512, help="tokens of a response, at most (default 512)"
    )
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        default=0.0,
        help="temperature; 0 takes the likeliest token (default 0)",
    )
    parser.add_argument(
        "--seed", metavar="S", type=int, default=0, help="the seed of sampling at a temperature above 0 (default 0)"
    )
    parser.add_argument("--version", action="version", version=__version__)
    options = parser.parse_args(arguments)
    if options.max_tokens < 1 or options.temperature < 0:
        parser.error("--max-tokens is at least 1, --temperature at least 0")
    try:
        _talk(options)
    except UserError as error:
        print_error(error, "hybridflow.cli.chat")
        return 1
    except KeyboardInterrupt:
        print()
    return 0


def model_directory(given: Path) -> Path:
    """A run's trained model, or the directory itself: of a whole model, or of adapters.

    Errors: RunDirError; ConfigError where the Hub is asked in vain.
    """
    if is_hub_name(str(given)):
        return Path(fetched(str(given), "RUN_OR_MODEL"))
    if (given / "hf" / "config.json").is_file():
        return _later_checkpoint(given) or given / "hf"
    if holds_adapter(given):
        return given
    if (given / METADATA).is_file():
        raise RunDirError(
            f"{given}: is a checkpoint of megatron, which the engine does not read. `hybridflow convert "
            "megatron-to-hf` writes the checkpoint's model"
        )
    if (given / "config.json").is_file():
        return given
    if (given / CONFIG).is_file():
        actor = _last_actor(given)
        if actor is None:
            raise RunDirError(f"{given}: the run has written no model yet, and has no checkpoint of an actor")
        return actor
    what = "is neither a run's directory nor a model's: no config.yaml and no config.json"
    raise RunDirError(f"{given}: {what}{gguf_hint(given)}")


def _last_actor(run: Path) -> Path | None:
    """The actor of a run's last checkpoint."""
    there = steps(run / CHECKPOINTS)
    actor = run / CHECKPOINTS / step_name(there[-1]) / "actor" if there else None
    return actor if actor is not None and actor.is_dir() else None


def _later_checkpoint(run: Path) -> Path | None:
    """The last checkpoint's actor, where the run went on after the end that wrote hf/, and has not ended since."""
    from hybridflow.recording.starts import read_starts  # torch loads for a second

    starts, actor = read_starts(run), _last_actor(run)
    if not starts or starts[-1].how == "finished" or actor is None:
        return None
    print(f"{run}/hf is of an earlier end of the run: the model is that of {actor.parent}", file=sys.stderr)
    return actor


def holds_adapter(path: Path) -> bool:
    """Whether a directory holds adapters alone: of PEFT, or a role of a checkpoint."""
    if not (path / ADAPTER_CONFIG).is_file():
        return False
    from hybridflow.architecture.adapter import is_adapter  # torch loads for a second

    return is_adapter(path)


@contextmanager
def whole_model(model: Path, base: str | None) -> Iterator[Path]:
    """A directory that the engine reads. Adapters are merged into their base model, and a checkpoint of megatron is
    converted, for as long as this lasts.

    Errors: UserError.
    """
    adapted = holds_adapter(model)
    if base is not None and not adapted:
        raise RunDirError(f"--base {base}: {model} holds no adapters of a base model")
    if not adapted and not (model / METADATA).is_file():
        yield model
        return
    from hybridflow.convert.adapted import base_directory
    from hybridflow.convert.to_huggingface import to_huggingface

    spec_that_talks(base_directory(model, base, key="RUN_OR_MODEL") if adapted else model)
    with tempfile.TemporaryDirectory(prefix="hybridflow-chat-") as directory:
        to_huggingface(model, Path(directory) / "model", base=base)
        yield Path(directory) / "model"


def run_of_model(model: Path) -> Path | None:
    """What wrote a directory and has a config: a run, or a checkpoint; None where nothing did."""
    parent, name = model.resolve().parent, model.resolve().name
    is_of_run = name in OF_A_RUN or (name == "actor" and (parent / MANIFEST).is_file())
    return parent if is_of_run and (parent / CONFIG).is_file() else None


def prompts_of_run(given: Path) -> tuple[bool | None, Mapping[str, Any]]:
    """How a run's prompts were made: whether by the chat template, and the arguments of the template.

    None where nobody says it: a model of no run, or fixed data that is not here. given: as `model_directory`.
    """
    run = given if (given / CONFIG).is_file() else run_of_model(given)
    if run is None:
        return None, {}
    data = read_tree(run / CONFIG).get("data")
    if not isinstance(data, dict):
        return None, {}
    kwargs = data.get("chat_template_kwargs")
    by_template = data.get("chat_template")
    if by_template is None and data.get("train") is not None:
        from hybridflow.data.first_rows import hold_conversations  # numpy and more load for a second

        by_template = hold_conversations(data["train"], data.get("columns") or {})
    return by_template, kwargs if isinstance(kwargs, dict) else {}


def spec_that_talks(model: Path, overrides: Mapping[str, Any] | None = None) -> "ModelSpec":
    """Of a model that generates. Errors: RunDirError for a reward model."""
    from hybridflow.architecture.spec import read_spec

    spec = read_spec(model, overrides=overrides)
    if spec.head == "score":
        raise RunDirError(
            f"{model}: is a reward model: it scores an answer and writes none. Chat needs a model that generates, such "
            "as the result of ppo, grpo, sft or dpo"
        )
    return spec


class ChatPrompts:
    """What has been said, as the model reads it: by the tokenizer's chat template, or each prompt alone.

    by_template: as the run says; None where nobody says it. arguments: of the template.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", by_template: bool | None, arguments: Mapping[str, Any]
    ) -> None:
        self._tokenizer, self.arguments = tokenizer, arguments
        self.has_template = tokenizer.chat_template is not None and by_template is not False
        self.messages: list[Message] = []

    def prompt(self, text: str) -> list[int]:
        """Token ids of what the model goes on from, with this text said last."""
        if not self.has_template:
            ids: list[int] = self._tokenizer(text)["input_ids"]
            return ids[:-1] if ids and ids[-1] == self._tokenizer.eos_token_id else ids
        self.messages.append({"role": "user", "content": text})
        rendered = self._tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=True, tokenize=False, **self.arguments
        )
        return list(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def kind(self) -> str:
        """For people."""
        if not self.has_template:
            return "no chat template: each line is a prompt of its own"
        given = f", with data.chat_template_kwargs {json.dumps(self.arguments)}" if self.arguments else ""
        return f"a conversation{given}"


class Chat:
    """A model that answers in a conversation."""

    def __init__(self, model: Path, options: argparse.Namespace) -> None:
        spec = spec_that_talks(model)  # before vLLM, which loads for seconds
        from hybridflow.data.end_tokens import end_tokens
        from hybridflow.data.tokenizers import load_tokenizer
        from hybridflow.parallel.platform import prepare_imports
        from hybridflow.rollout.chat_engine import ChatEngine

        prepare_imports("auto")
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(model)
        self.conversation = ChatPrompts(self.tokenizer, *prompts_of_run(options.model))
        by_template = self.conversation.has_template
        self._ends: EndTokens = end_tokens(model, self.tokenizer, spec.vocab_size, template=by_template)
        self._length, self._options = min(spec.max_positions, MOST_LENGTH), options
        self._engine: ChatEngine = ChatEngine(model, max_length=self._length)

    def answer(self, text: str) -> Iterator[str]:
        """What the model says to it, piece by piece. Errors: UserError where it is too long."""
        ids = self.conversation.prompt(text)
        room = self._length - len(ids)
        if room < 1:
            self.conversation.messages.clear()
            raise RunDirError(f"the prompt has {len(ids)} tokens, the model takes {self._length}: begin anew")
        shown = whole = ""
        for made in self._engine.stream(
            ids,
            ends=self._ends.ids,
            max_tokens=min(self._options.max_tokens, room),
            temperature=self._options.temperature,
            seed=self._options.seed,
        ):
            whole = str(self.tokenizer.decode([i for i in made if i not in self._ends.ids]))
            if not whole.endswith("\ufffd"):  # the rest of a character comes with the next token
                yield whole[len(shown) :]
                shown = whole
        yield whole[len(shown) :]
        self.conversation.messages.append({"role": "assistant", "content": whole})


def _talk(options: argparse.Namespace) -> None:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read as torch loads, which the spec's module does
    model = model_directory(options.model)
    if options.prompt is None:
        print(f"loading {model}", flush=True)
    with whole_model(model, options.base) as whole:
        _converse(Chat(whole, options), options)


def _converse(chat: "Chat", options: argparse.Namespace) -> None:
    if options.prompt is not None:
        _print(chat.answer(options.prompt))
        return
    print(f"{chat.conversation.kind()}; /reset begins anew, /quit ends", flush=True)
    while (line := _read()) is not None:
        if line == "/reset":
            chat.conversation.messages.clear()
        elif line:
            try:
                _print(chat.answer(line))
            except UserError as error:  # the next line may be shorter
                print_error(error, "hybridflow.cli.chat")


def _read() -> str | None:
    """A line of the person's; None at the end."""
    try:
        line = input("> ").strip()
    except EOFError:
        print()
        return None
    return None if line in ("/quit", "/exit") else line


def _print(pieces: Iterator[str]) -> None:
    for piece in pieces:
        print(piece, end="", flush=True)
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
