"""reference/api.md: signatures and docstrings of the public names, as plain Markdown, read from the source.

No module is imported: the page needs neither megatron-core nor vLLM. A line `::: NAME` of TEMPLATE becomes the entry of
that name in NAMES.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from docs.generator.markdown import HEAD

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 100  # letters of a signature on one line
NAMED = re.compile(r"(?P<names>Errors|[a-z_]\w*(?:, [a-z_]\w*)*): (?P<text>.*)")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Public:
    """A public name.

    file: of the package, where it is defined. bases: (file, class) of inherited members. members: those that are shown,
    None for all without an underscore.
    """

    file: str
    bases: tuple[tuple[str, str], ...] = ()
    members: tuple[str, ...] | None = None


RUN = Public("flows/run.py", bases=(("flows/bookkeeping.py", "IterationData"),))
NAMES = {
    "hybridflow.RLTrainer": Public(
        "trainers/tutorial_names.py",
        bases=(("trainers/online.py", "OnlineTrainer"),),
        members=("__init__", "from_yaml", "fit", "evaluate", "load_checkpoint"),
    ),
    "hybridflow.get_trainer_config": Public("trainers/tutorial_names.py"),
    "hybridflow.create_critic_model": Public("trainers/tutorial_names.py"),
    "hybridflow.make_rl_data_loader": Public("trainers/tutorial_names.py"),
    "hybridflow.FixedDataTrainer": Public("trainers/fixed_data.py", members=("from_yaml", "fit", "evaluate")),
    "hybridflow.flows.run.Run": RUN,
    "hybridflow.flows.generation.Sampled": Public("flows/generation.py"),
    "hybridflow.flows.generation.Greedy": Public("flows/generation.py"),
    "hybridflow.flows.known.Known": Public("flows/known.py"),
    "hybridflow.rewards.scorer.Scores": Public("rewards/scorer.py", members=()),
    "hybridflow.parallel.exchange.PartialTensor": Public("parallel/exchange.py", members=()),
    "hybridflow.config.algorithms.Custom": Public("config/algorithms.py", members=()),
    "hybridflow.roles.policy.Actor": Public("roles/policy.py", members=("log_probs", "update", "step")),
    "hybridflow.roles.policy.Reference": Public("roles/policy.py", members=("log_probs",)),
    "hybridflow.roles.values.Critic": Public("roles/values.py", members=("values", "update")),
    "hybridflow.batch.PromptBatch": Public("batch.py"),
    "hybridflow.batch.RolloutBatch": Public("batch.py"),
    "hybridflow.batch.Tokens": Public("batch.py"),
    "hybridflow.roles.objectives.PolicyObjective": Public("roles/objectives.py"),
    "hybridflow.roles.objectives.ValueObjective": Public("roles/objectives.py"),
    "hybridflow.environments.ModelTurn": Public("environments/model_turn.py"),
    "hybridflow.rewards.functions.exact_match": Public("rewards/functions.py"),
    "hybridflow.rewards.numeric.numeric_match": Public("rewards/numeric.py"),
    "hybridflow.rewards.mathematics.math_equal": Public("rewards/mathematics.py"),
    "hybridflow.rewards.texts.matches": Public("rewards/texts.py"),
    "hybridflow.rewards.texts.opening_of": Public("rewards/texts.py"),
    "hybridflow.rewards.texts.length_penalty": Public("rewards/texts.py"),
    "hybridflow.rewards.code.passes_tests": Public("rewards/code.py"),
    "hybridflow.rewards.gym.reasoning_gym": Public("rewards/gym.py"),
}

TEMPLATE = """\
# Python API

These names stay when releases change. Everything else in the package may move.

## Train from Python

`from hybridflow import RLTrainer` loads nothing heavy before a trainer is made. A program that uses these names is
started by torchrun, a process for each rank.

::: hybridflow.RLTrainer
::: hybridflow.get_trainer_config
::: hybridflow.create_critic_model
::: hybridflow.make_rl_data_loader
::: hybridflow.FixedDataTrainer

## Write an algorithm

An algorithm is a function `flow(run, c)`. `run` is a `Run`, and `c` is the section `algorithm` of the config. The
function returns the batch that it trained on. `algorithm: {name: custom, flow: my_module:my_flow}` runs it.
[The page on algorithms](../extend/algorithm.md) has an example and the shapes.

::: hybridflow.flows.run.Run
::: hybridflow.flows.known.Known
::: hybridflow.rewards.scorer.Scores
::: hybridflow.parallel.exchange.PartialTensor
::: hybridflow.flows.generation.Sampled
::: hybridflow.flows.generation.Greedy
::: hybridflow.config.algorithms.Custom
::: hybridflow.roles.policy.Actor
::: hybridflow.roles.policy.Reference
::: hybridflow.roles.values.Critic

## Batches

::: hybridflow.batch.PromptBatch
::: hybridflow.batch.RolloutBatch

`PerToken` and `PerSequence` mark the fields of a batch: `values: PerToken` has one entry a token, `scores: PerSequence`
one entry a sequence.

## Objectives

::: hybridflow.roles.objectives.PolicyObjective
::: hybridflow.roles.objectives.ValueObjective
::: hybridflow.batch.Tokens

## Environments

[The page on environments](../extend/environment.md) has an example of a class.

::: hybridflow.environments.ModelTurn

## Reward functions

A reward function is `package.module:function` in the config, and takes three lists:

```python
def my_reward(prompts: list[str], responses: list[str], columns: dict[str, list]) -> list[float]: ...
```

`prompts` and `responses` are texts. `columns` has the other columns of the data file, by name. The function returns a
number for each response, or a dictionary of numbers. It may be an `async def`. The functions below are shipped; a
config names them as `hybridflow.rewards:NAME`.

::: hybridflow.rewards.functions.exact_match
::: hybridflow.rewards.numeric.numeric_match
::: hybridflow.rewards.mathematics.math_equal
::: hybridflow.rewards.texts.matches
::: hybridflow.rewards.texts.opening_of
::: hybridflow.rewards.texts.length_penalty
::: hybridflow.rewards.code.passes_tests
::: hybridflow.rewards.gym.reasoning_gym
"""


def page() -> str:
    text = re.sub(r"^::: (\S+)\n", lambda match: f"{entry(match[1])}\n", TEMPLATE, flags=re.MULTILINE)
    return HEAD + re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def entry(name: str) -> str:
    """A title with an anchor, the signature, the docstring, and the members of a class."""
    public, last = NAMES[name], name.rpartition(".")[2]
    node = _defined(public.file, last)
    title = f"### `{name}` {{ #{name} }}\n"
    if isinstance(node, Function):
        return "\n".join([title, *_described([_signature(node)], ast.get_docstring(node))])
    parts = [title, *_described([_class(node, public)], ast.get_docstring(node))]
    for member, overloads in _members(node, public).items():
        shown = [_signature(one, member=True) for one in overloads[:-1] or overloads]
        parts += [f"#### `{last}.{member}` {{ #{name}.{member} }}\n"]
        parts += _described(shown, ast.get_docstring(overloads[-1]) or ast.get_docstring(overloads[0]))
    return "\n".join(parts)


def _described(signatures: Sequence[str], docstring: str | None) -> list[str]:
    shown = "\n".join(signatures)
    return [f"```python\n{shown}\n```\n", *([f"{with_lists(docstring)}\n"] if docstring else [])]


def with_lists(text: str) -> str:
    """Each line that begins with names of arguments as an item; lines that go on with an item stay within it."""
    lines: list[str] = []
    within = False
    for line in text.splitlines():
        begins = within or not lines or re.search(r"[.:]$|^$", lines[-1])  # else a sentence goes on with such a word
        found = NAMED.fullmatch(line) if begins else None
        if found:
            lines += [*([] if within else [""]), f"- {_names(found['names'])}: {found['text']}"]
            within = True
        elif not line.strip():
            lines.append(line)
            within = False
        else:
            lines.append(f"  {line}" if within and not line.startswith(" ") else line)
    return "\n".join(lines)


def _names(names: str) -> str:
    return names if names == "Errors" else ", ".join(f"`{name}`" for name in names.split(", "))


# ------------------------------------------------------------------------------------------------ the source


def _defined(file: str, name: str) -> ast.ClassDef | Function:
    """The class or function of a file of the package. Errors: LookupError."""
    for node in ast.parse((ROOT / "hybridflow" / file).read_text()).body:
        if isinstance(node, ast.ClassDef | Function) and node.name == name:
            return node
    raise LookupError(f"hybridflow/{file} defines no {name}")


def _class(node: ast.ClassDef, public: Public) -> str:
    """The class line and the fields, as the source has them, without their descriptions."""
    bases = ", ".join(map(ast.unparse, node.bases))
    fields = [line for file, name in ((public.file, node.name), *public.bases) for line in _fields(file, name)]
    head = f"class {node.name}{f'({bases})' if bases else ''}:"
    return "\n".join([head, *fields] if fields else [f"{head} ..."])


def _fields(file: str, name: str) -> Iterator[str]:
    lines = (ROOT / "hybridflow" / file).read_text().splitlines()
    for each in _defined(file, name).body:
        if isinstance(each, ast.AnnAssign) and not ast.unparse(each.target).startswith("_"):
            yield from lines[each.lineno - 1 : each.end_lineno]


def _members(node: ast.ClassDef, public: Public) -> dict[str, list[Function]]:
    """Methods by name, overloads first; a class's own in the place of inherited ones."""
    found: dict[str, list[Function]] = {}
    for owner in (node, *(_defined(file, name) for file, name in public.bases)):
        assert isinstance(owner, ast.ClassDef), "bases are classes"
        own: dict[str, list[Function]] = {}
        for each in owner.body:
            if isinstance(each, Function) and _is_shown(each.name, public):
                own.setdefault(each.name, []).append(each)
        found |= {name: nodes for name, nodes in own.items() if name not in found}
    return found


def _is_shown(name: str, public: Public) -> bool:
    return not name.startswith("_") if public.members is None else name in public.members


def _signature(node: Function, *, member: bool = False) -> str:
    """`def` and all; of a property `name: type`. An argument a line where one line is too long."""
    marks = [ast.unparse(each) for each in node.decorator_list]
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    if "property" in marks:
        return f"{node.name}: {ast.unparse(node.returns) if node.returns is not None else 'Any'}"
    arguments = [re.sub("=", " = ", each, count=1) if ": " in each else each for each in _split(ast.unparse(node.args))]
    arguments = arguments[1:] if member and "staticmethod" not in marks else arguments
    line = f"def {node.name}({', '.join(arguments)}){result}: ..."
    if len(line) > WIDTH:
        line = f"def {node.name}(" + "".join(f"\n    {each}," for each in arguments) + f"\n){result}: ..."
    return f"@classmethod\n{line}" if "classmethod" in marks else line


def _split(text: str) -> Iterator[str]:
    """At commas outside of brackets and quotes."""
    depth, start, quoted = 0, 0, ""
    for place, sign in enumerate(text):
        if quoted or sign in "'\"":
            quoted = "" if sign == quoted else quoted or sign
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif sign == "," and not depth:
            yield text[start:place].strip()
            start = place + 1
    if text[start:].strip():
        yield text[start:].strip()
