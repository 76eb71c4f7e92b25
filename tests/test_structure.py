"""Who may import whom: floors, cycles, sole users, read from the syntax of hybridflow/, tools/ and launch/.

Nothing is imported, so an import inside a function or under TYPE_CHECKING counts like any other. The second
half of the file gives `violations` small made-up trees, one for each thing that it has to find.
"""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("hybridflow", "tools", "launch")

# A module may import modules of its own floor and of lower ones. Names are relative to hybridflow.
FLOORS: dict[int, list[str]] = {
    0: [
        "errors",
        "user_code",
        "batch",
        "algorithms",
        "algorithms.*",
        "parallel.layout",
        "parallel.ranks",
        "parallel.seeds",
        "parallel.streams",
        "config",
        "config.*",
        "cli.command",
        "launcher",
        "launcher.*",
    ],
    1: [
        "parallel",
        "parallel.*",
        "formats",
        "formats.*",
        "cpu",
        "cpu.fresh_pages",
        "cpu.kernels",
        "cpu.kernels.*",
        "cpu.megatron",
        "cpu.megatron.*",
        "cpu.peer_memory",
    ],
    2: ["architecture", "architecture.*", "cpu.layers", "cpu.attention", "cpu.mover", "cpu.transport"],
    3: ["models", "models.*", "cpu.engine", "cpu.engine.*", "reshard", "reshard.*", "rollout", "rollout.*"],
    4: ["recording", "recording.*", "placement", "placement.*"],
    5: ["roles", "roles.*", "reporting", "reporting.*"],
    6: [
        "rewards",
        "rewards.*",
        "environments",
        "environments.*",
        "agents",
        "agents.*",
        "data",
        "data.*",
        "checkpoint",
        "checkpoint.*",
        "automap",
        "automap.*",
    ],
    7: ["flows", "flows.*", "convert", "convert.*"],
    8: ["trainers", "trainers.*"],
    9: ["cli", "cli.*", "inspection", "inspection.*", "examples", "examples.*"],
}
# Former paths and commands: a few lines each, that lead to where it is now.
FORWARDERS = [
    "__main__",
    "algorithm_config",
    "checkpoints",
    "data.__main__",
    "fixed_config",
    "fixed_trainer",
    "front",
    "health",
    "plan",
    "report",
    "samples",
    "train",
    "trainer",
]
ENTRY_FLOOR = 9  # hybridflow itself, whose __getattr__ imports the trainers
OUTER_FLOOR = 10  # tools and launch: nothing in hybridflow imports them

ENVIRONMENT_USERS = [
    "hybridflow.environments.verifiers_runner",  # of a process that verifiers is in: it reads a key from there
    "hybridflow.parallel.platform",
    "hybridflow.parallel.torchrun",
    "hybridflow.parallel.device",
    "hybridflow.cpu.kernels.library",
    "hybridflow.cpu.megatron.overlays",
    "hybridflow.rollout",
    "hybridflow.rollout.*",
    "hybridflow.parallel.agent",
    "hybridflow.parallel.proxies",
    "hybridflow.parallel.rank_log",
    "hybridflow.parallel.streams",  # how Python reads text
    "hybridflow.parallel.versions",
    "hybridflow.cli.chat",  # before torch is loaded
    "hybridflow.config.hub",  # before huggingface_hub is loaded
    "hybridflow.cli.env",  # tells of them
    "hybridflow.launcher.*",
]

# What only these modules may name, in an import or as an attribute.
SOLE_USERS: dict[str, list[str]] = {
    "megatron.core.parallel_state": ["hybridflow.parallel.grid", "hybridflow.parallel.platform"],
    "megatron.core.mpu": ["hybridflow.parallel.grid", "hybridflow.parallel.platform"],  # the same module
    "megatron.core.pipeline_parallel": ["hybridflow.models.pipeline"],
    "megatron.core.dist_checkpointing": ["hybridflow.checkpoint", "hybridflow.checkpoint.*"],
    "vllm": ["hybridflow.rollout", "hybridflow.rollout.*", "hybridflow.cpu.engine.*"],
    "triton": [
        "hybridflow.models.expert_triton",  # torch sorts, adds by index, and has no activation with shares
        "hybridflow.parallel.vocab_triton",  # torch makes 18 float32 passes over the logits where one read is enough
        "hybridflow.reshard.kernel",  # torch has no permutation in place, and one launch a copy
    ],
    "wandb": ["hybridflow.recording.trackers"],
    "mlflow": ["hybridflow.recording.trackers"],
    "yaml": ["hybridflow.config.files", "hybridflow.config.run"],
    "torch.cuda.is_available": ["hybridflow.parallel.device"],  # where the CPU is chosen, there may be CUDA
    **{name: ENVIRONMENT_USERS for name in ("os.environ", "os.getenv", "os.putenv", "os.unsetenv")},
}

# What these modules may not name.
FORBIDDEN: dict[str, list[str]] = {
    "hybridflow.algorithms": ["torch.distributed", "hybridflow.config"],
    "hybridflow.reshard.plan": ["torch.distributed"],
}

# Who opens a door of hybridflow/cpu/: once, when a run starts or a model is built. None else imports what is behind it.
DOORS = {
    "hybridflow.models.layer_classes": "layers and core attention of a model",
    "hybridflow.parallel.vocab": "log-probs and entropies of logits",
    "hybridflow.reshard.execute": "mover and transport of the reshard",
    "hybridflow.rollout.device": "the engine's device",
    "hybridflow.parallel.platform": "megatron's own needs",
}
# Who may ask for the device beside them.
ASKERS = {
    "hybridflow.parallel.device": "defines the questions",
    "hybridflow.inspection.*": "tells people what is there",
    "hybridflow.placement.*": "plans memory",
    "hybridflow.automap.*": "plans memory",
    "hybridflow.trainers.auto": "plans memory",
    "hybridflow.models.memory": "pinned memory",
    "hybridflow.checkpoint.writer": "pinned memory",
}
QUESTIONS = {"is_cuda", "uses_cuda", "has_cuda", "takes"}

# Who may import hybridflow/automap/: of what a run is made of the first alone.
PLANNERS = [
    "hybridflow.trainers.auto",
    "hybridflow.cli.plan*",
    "hybridflow.automap",
    "hybridflow.automap.*",
]

LAUNCHER = "hybridflow.launcher"
MAX_LINES, MAX_FUNCTION_LINES = 400, 60
TABLES = ["hybridflow.architecture.weights"]  # rows, one after the other

MAX_POSITIONAL = 5
# Calls that may have more arguments without a name, by what is called.
POSITIONAL = {
    "*.add_row": "cells of a table",
    "RichProgress": "columns of a table",
    "runs.run": "words of a command line",
    "*.info": "values of a log line's format",
    "*.apply": "an autograd function takes no names",
    "*.kernel.backward": "as below",
    "ctx.kernel": "two kernels of one signature, one of them torch's",
    "torch.ops.*": "torch's operators",
    "varlen_attn": "torch's",
    "_LIBC.*": "C",
    "_call": "the CUDA driver, C",
    "their_update": "vLLM's, replaced as vLLM calls it",
    "their_forward": "vLLM's, replaced as vLLM calls it",
}

# Neither may reach the other, not even through a third module: the trainer introduces them.
STRANGERS = ("hybridflow.reshard", "hybridflow.rollout")


def test_the_tree_keeps_its_structure() -> None:
    assert violations(read_tree(ROOT)) == []


def test_importing_hybridflow_loads_no_heavy_package() -> None:
    heavy = {"torch", "megatron", "vllm", "transformers"}
    code = f"import hybridflow, sys; loaded = {heavy} & set(sys.modules); assert not loaded, loaded"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------ the checker


def violations(tree: dict[str, str]) -> list[str]:
    """One line for each broken rule in a tree of module name -> source; empty when every rule holds."""
    used = {module: used_names(module, source, tree) for module, source in tree.items()}
    imports = {module: imported_modules(module, names, tree) for module, names in used.items()}
    return [
        *unlisted(tree),
        *upward_imports(imports),
        *import_cycles(imports),
        *room_cycles(imports),
        *sole_user_breaches(used),
        *forbidden_names(used),
        *launcher_needs(used),
        *strangers_met(imports),
        *doors_passed_by(imports),
        *automap_met(imports),
        *questions_asked(tree),
        *names_that_stand_twice(tree),
        *too_long(tree),
        *without_names(tree),
        *texts_of_no_encoding(tree),
    ]


def read_tree(root: Path) -> dict[str, str]:
    paths = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    return {module_name(path.relative_to(root)): path.read_text() for path in paths}


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def used_names(module: str, source: str, tree: dict[str, str]) -> dict[str, int]:
    """Every dotted name that the source imports, or reaches by attribute from an import, with its line."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt | ast.expr)]
    nodes.sort(key=lambda node: node.lineno)
    is_package = any(other.startswith(module + ".") for other in tree)
    package = module if is_package else module.rpartition(".")[0]
    bound: dict[str, str] = {}  # local name -> what it stands for
    used: dict[str, int] = {}
    for node in nodes:
        for local, name in imports_of(node, package):
            # `import a.b` binds `a`; every other form binds the whole name
            bound[local] = local if name.partition(".")[0] == local else name
            used.setdefault(name, node.lineno)
    for node in nodes:
        first, _, rest = dotted(node).partition(".")
        if rest and first in bound:
            used.setdefault(f"{bound[first]}.{rest}", node.lineno)
    return used


def imports_of(node: ast.AST, package: str) -> Iterable[tuple[str, str]]:
    """(local name, full dotted name) of each thing that an import statement, or one by string, brings in."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0], alias.name
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = package.split(".")[: len(package.split(".")) - (node.level - 1)]
            base = ".".join([*above, *([base] if base else [])])
        for alias in node.names:
            yield alias.asname or alias.name, f"{base}.{alias.name}"
    elif isinstance(node, ast.Call) and dotted(node.func).endswith(("import_module", "__import__")):
        for argument in node.args[:1]:
            if isinstance(argument, ast.Constant):
                yield "", str(argument.value)


def dotted(node: ast.AST) -> str:
    """'a.b.c' for that expression, '' for anything that is not a chain of attributes on a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (value := dotted(node.value)):
        return f"{value}.{node.attr}"
    return ""


def imported_modules(module: str, names: dict[str, int], tree: dict[str, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, line in names.items():
        if within(name, PACKAGES) and name != "hybridflow.__version__":
            target = owner(name, tree)
            if target != module:
                found.setdefault(target, line)
    return found


def owner(name: str, tree: dict[str, str]) -> str:
    """The module that a dotted name of ours lives in: its longest prefix that is a module."""
    parts = name.split(".")
    prefixes = [".".join(parts[:count]) for count in range(len(parts), 1, -1)]
    in_tree = [prefix for prefix in prefixes if prefix in tree]
    in_table = [prefix for prefix in prefixes if floor(prefix) <= OUTER_FLOOR]  # a module that is yet to be written
    return [*in_tree, *in_table, parts[0]][0]


def floor(module: str) -> float:
    """The floor of a module, infinity for one that is on none."""
    if module == "hybridflow":
        return ENTRY_FLOOR
    if within(module, ("tools", "launch")):
        return OUTER_FLOOR
    short = module.removeprefix("hybridflow.")
    if short in FORWARDERS:
        return ENTRY_FLOOR
    return next((level for level, patterns in FLOORS.items() if matches(short, patterns)), float("inf"))


def matches(module: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in patterns)


def within(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def unlisted(tree: dict[str, str]) -> list[str]:
    return [
        f"{module} is on no floor: add it to FLOORS in tests/test_structure.py, as low as its imports allow"
        for module in tree
        if floor(module) == float("inf")
    ]


def upward_imports(imports: dict[str, dict[str, int]]) -> list[str]:
    return [
        f"{module}:{line} (floor {floor(module)}) imports {target} (floor {floor(target)}): only downwards"
        for module, targets in imports.items()
        for target, line in targets.items()
        if floor(module) < floor(target) < float("inf")  # infinity: reported as unlisted
    ]


def import_cycles(imports: Mapping[str, Collection[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return ["import cycle: " + " -> ".join(reversed(error.args[1]))]
    return []


def room_cycles(imports: dict[str, dict[str, int]]) -> list[str]:
    """Circles between folders, where no module is in one: those are `import_cycles`."""
    if import_cycles(imports):
        return []
    rooms: dict[str, set[str]] = {}
    for module, targets in imports.items():
        rooms.setdefault(room(module), set()).update({room(target) for target in targets} - {room(module)})
    return [found.replace("import cycle", "rooms in a circle") for found in import_cycles(rooms)]


def room(module: str) -> str:
    """The folder of hybridflow/ that a module lies in, or the module itself where it lies in none.

    Each part of hybridflow/cpu/ is a room: one room would make circles with those that it serves. A former path is one.
    """
    if module.removeprefix("hybridflow.") in FORWARDERS:
        return module
    parts = module.split(".")
    return ".".join(parts[: 3 if parts[:2] == ["hybridflow", "cpu"] else 2])


def sole_user_breaches(used: dict[str, dict[str, int]]) -> list[str]:
    return [
        f"{module}:{line} uses {name}: only {', '.join(users)} may use {owned}"
        for module, names in used.items()
        for owned, users in SOLE_USERS.items()
        if not matches(module, users)
        for name, line in first_within(names, owned)
    ]


def forbidden_names(used: dict[str, dict[str, int]]) -> list[str]:
    return [
        f"{module}:{line} uses {name}: {area} may not use {banned}"
        for module, names in used.items()
        for area, bans in FORBIDDEN.items()
        if within(module, [area])
        for banned in bans
        for name, line in first_within(names, banned)
    ]


def launcher_needs(used: dict[str, dict[str, int]]) -> list[str]:
    """Any Python starts it, without an environment."""
    return [
        f"{module}:{line} uses {name}: the launcher needs the standard library alone"
        for module, names in used.items()
        if within(module, [LAUNCHER])
        for name, line in names.items()
        if name.partition(".")[0] not in sys.stdlib_module_names and not within(name, [LAUNCHER])
    ]


def first_within(names: dict[str, int], package: str) -> list[tuple[str, int]]:
    """The first use of a package, as a list of one or none: each module is reported once."""
    uses = [(name, line) for name, line in names.items() if within(name, [package])]
    return sorted(uses, key=lambda use: use[1])[:1]


def strangers_met(imports: dict[str, dict[str, int]]) -> list[str]:
    return [
        f"{module} imports {met}, if not directly: reshard and rollout never import each other"
        for one, other in (STRANGERS, STRANGERS[::-1])
        for module in imports
        if within(module, [one])
        for met in sorted(reachable(module, imports))
        if within(met, [other])
    ]


def doors_passed_by(imports: dict[str, dict[str, int]]) -> list[str]:
    return [
        f"{module}:{line} imports {target}: only {', '.join(DOORS)} open hybridflow/cpu/"
        for module, targets in imports.items()
        if module not in DOORS and not within(module, ["hybridflow.cpu"])
        for target, line in targets.items()
        if within(target, ["hybridflow.cpu"])
    ]


def automap_met(imports: dict[str, dict[str, int]]) -> list[str]:
    return [
        f"{module}:{line} imports {target}: only {', '.join(PLANNERS[:2])} may"
        for module, targets in imports.items()
        if not matches(module, PLANNERS)
        for target, line in targets.items()
        if within(target, ["hybridflow.automap"])
    ]


def questions_asked(tree: dict[str, str]) -> list[str]:
    """Names, attributes and functions, however they came there."""
    return [
        f"{module}:{node.lineno} asks {name}: what depends on the device is chosen by {', '.join(DOORS)}"
        for module, source in tree.items()
        if module not in DOORS and not matches(module, ASKERS)
        for node in ast.walk(ast.parse(source))
        if (name := asked(node)) in QUESTIONS
    ]


def names_that_stand_twice(tree: dict[str, str]) -> list[str]:
    """Public classes: whoever looks for one by its name finds one."""
    found: dict[str, list[str]] = {}
    for module, source in tree.items():
        if within(module, ["hybridflow"]):
            classes = [node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
            for name in classes:
                found.setdefault(name, []).append(module)
    return [
        f"{modules[1]}: the class {name} has the name of one in {modules[0]}"
        for name, modules in found.items()
        if len(modules) > 1 and not name.startswith("_")
    ]


def too_long(tree: dict[str, str]) -> list[str]:
    return [
        *(
            f"{module} has {lines} lines, at most {MAX_LINES}: cut it by what it is for"
            for module, source in tree.items()
            if module not in TABLES and (lines := source.count("\n")) > MAX_LINES
        ),
        *(
            f"{module}:{node.lineno} {node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"
            for module, source in tree.items()
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.end_lineno is not None
            and (lines := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES
        ),
    ]


def without_names(tree: dict[str, str]) -> list[str]:
    """Calls with more than MAX_POSITIONAL arguments that say not what they are."""
    return [
        f"{module}:{node.lineno} {ast.unparse(node.func)}: {count} arguments have no name, at most {MAX_POSITIONAL}"
        for module, source in tree.items()
        if within(module, ["hybridflow"])
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and (count := len(node.args)) > MAX_POSITIONAL
        and not any(fnmatchcase(ast.unparse(node.func), called) for called in POSITIONAL)
    ]


def texts_of_no_encoding(tree: dict[str, str]) -> list[str]:
    """The locale would choose. What programs print may be anything: `errors` says what happens to it."""
    return [
        f"{module}:{node.lineno} {ast.unparse(node.func)}: names no encoding"
        for module, source in tree.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and is_text_of_locale(node)
    ]


def is_text_of_locale(node: ast.Call) -> bool:
    name, words = ast.unparse(node.func), {keyword.arg for keyword in node.keywords}
    given = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "mode")]
    modes = {
        x.value for x in given if isinstance(x, ast.Constant) and re.fullmatch(r"[rwax+]*b?[rwax+]*", str(x.value))
    }
    if "encoding" in words or name == "os.open" or any("b" in mode for mode in modes):
        return False
    if name.endswith((".read_text", ".write_text")) or name == "open":
        return True
    if name.endswith((".open", "fdopen", "NamedTemporaryFile")):
        return bool(modes) or "newline" in words
    return name.endswith(("run", "Popen", "check_output")) and "text" in words and "errors" not in words


def asked(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.name if isinstance(node, ast.FunctionDef | ast.alias) else ""


def reachable(module: str, imports: dict[str, dict[str, int]]) -> set[str]:
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        new = set(imports.get(waiting.pop(), ())) - seen
        seen |= new
        waiting.extend(new)
    return seen


# --------------------------------------------------------------------------- the checker finds what it has to

CLEAN = {
    "hybridflow": "__version__ = '0'\ndef __getattr__(name):\n    from hybridflow.trainers.online import RLTrainer",
    "hybridflow.config": "class Experiment:\n    pass",
    "hybridflow.config.files": "import yaml",
    "hybridflow.algorithms": "",
    "hybridflow.algorithms.advantages": "import torch\nfrom hybridflow.algorithms.moments import whiten",
    "hybridflow.algorithms.moments": "import torch\ntorch.zeros(1).sum()",
    "hybridflow.parallel.platform": "import os\nos.environ['A']\nfrom megatron.core import parallel_state",
    "hybridflow.models.memory": "",
    "hybridflow.reshard.slices": "import hybridflow.models.memory",
    "hybridflow.reshard.slots": "",
    "hybridflow.models.pipeline": "from megatron.core.pipeline_parallel import schedules",
    "hybridflow.reshard.kernel": "import triton\nimport triton.language as tl",
    "hybridflow.reshard.plan": "from hybridflow.config import Experiment",
    "hybridflow.rollout.engine": "import os, vllm\nos.environ.get('A')\nfrom hybridflow import __version__",
    "hybridflow.checkpoint": "from megatron.core import dist_checkpointing",
    "hybridflow.trainers.online": "import hybridflow.reshard.plan\nfrom hybridflow.rollout.engine import Engine",
    "tools.convert": "from hybridflow.models.pipeline import run",
    "hybridflow.launcher.hosts": "from os import environ\nimport subprocess",
}

MOMENTS = "hybridflow.algorithms.moments"
ACTOR = "hybridflow.roles.actor"
# what is wrong: (module, its source, part of the message)
BROKEN = {
    "unlisted module": ("hybridflow.novelty", "", "hybridflow.novelty is on no floor: add it to FLOORS"),
    "unlisted room": ("hybridflow.lounge.sofa", "", "hybridflow.lounge.sofa is on no floor"),
    "upward import": (
        "hybridflow.data",
        "from hybridflow.trainers.online import A",
        "hybridflow.data:1 (floor 6) imports",
    ),
    "upward, from the package": ("hybridflow.data", "from hybridflow import trainers", "trainers (floor 8)"),
    "upward, in a function": (
        "hybridflow.data",
        "def f():\n    import hybridflow.trainers.online",
        "data:2 (floor 6)",
    ),
    "upward, relative": ("hybridflow.parallel.grid", "from ..roles import actor", "imports hybridflow.roles"),
    "upward, by string": ("hybridflow.data", "importlib.import_module('hybridflow.trainers.online')", "(floor 8)"),
    "upward, lazily": ("hybridflow.data", "from hybridflow import RLTrainer", "imports hybridflow (floor 9)"),
    "upward, to the tools": ("hybridflow.train", "import tools.convert", "imports tools.convert (floor 10)"),
    "circle of rooms": (
        "hybridflow.models.extra",
        "import hybridflow.reshard.slots",
        "rooms in a circle: hybridflow.",
    ),
    "cycle": (MOMENTS, "from hybridflow.algorithms.advantages import gae", "import cycle: "),
    "parallel state": (
        ACTOR,
        "from megatron.core import parallel_state",
        "uses megatron.core.parallel_state",
    ),
    "parallel state, its other name": (
        ACTOR,
        "from megatron.core import mpu as m",
        "only hybridflow.parallel.grid",
    ),
    "parallel state, by attribute": (
        ACTOR,
        "import megatron.core as m\n\nm.parallel_state.x()",
        "actor:3 uses",
    ),
    "schedules": (ACTOR, "from megatron.core.pipeline_parallel.schedules import f", "only hybridflow.models"),
    "dist_checkpointing": (ACTOR, "import megatron.core.dist_checkpointing", "only hybridflow.checkpoint"),
    "vllm": ("hybridflow.trainers.online", "from vllm import LLM", "only hybridflow.rollout"),
    "triton": (
        "hybridflow.reshard.execute",
        "import triton.language as tl",
        "only hybridflow.models.expert_triton, hybridflow.parallel.vocab_triton, hybridflow.reshard.kernel",
    ),
    "yaml": ("tools.convert", "import yaml", "tools.convert:1 uses yaml"),
    "os.environ": (
        "hybridflow.train",
        "import os\nos.environ.get('RANK')",
        "hybridflow.train:2 uses os.environ",
    ),
    "os.environ, from os": ("hybridflow.train", "from os import environ as e", "uses os.environ"),
    "os.getenv": ("tools.convert", "import os\nos.getenv('RANK')", "uses os.getenv"),
    "reshard to rollout": (
        "hybridflow.reshard.execute",
        "import hybridflow.rollout.engine",
        "imports hybridflow.rollout.engine",
    ),
    "rollout to reshard": (
        "hybridflow.rollout.engine",
        "from hybridflow.reshard import plan",
        "imports hybridflow.reshard.plan",
    ),
    "a part of the CPU's without a door": (
        "hybridflow.models.extra",
        "from hybridflow.cpu.kernels.layers import swiglu",
        "models.extra:1 imports hybridflow.cpu.kernels",
    ),
    "the device, of a tensor": (
        "hybridflow.roles.actor",
        "def f(x):\n    return x.is_cuda",
        "actor:2 asks is_cuda",
    ),
    "the device, by another name": (
        "hybridflow.roles.actor",
        "from hybridflow.parallel.device import uses_cuda as u",
        "actor:1 asks uses_cuda",
    ),
    "the device, of the platform": (
        "hybridflow.trainers.online",
        "def f(platform):\n    return platform.has_cuda",
        "online:2 asks has_cuda",
    ),
    "the search, of a run": (
        "hybridflow.trainers.online",
        "from hybridflow.automap.search import search",
        "online:1 imports hybridflow.automap.search",
    ),
    "a class's name twice": (
        "hybridflow.roles.actor",
        "class Experiment:\n    pass",
        "hybridflow.roles.actor: the class Experiment has the name of one in hybridflow.config",
    ),
    "a long file": ("hybridflow.roles.actor", "x = 1\n" * 401, "hybridflow.roles.actor has 401 lines"),
    "a long function": (
        "hybridflow.roles.actor",
        "def f():\n" + "    x = 1\n" * 60,
        "hybridflow.roles.actor:1 f has 61 lines",
    ),
    "arguments without names": (
        "hybridflow.roles.actor",
        "def f(g):\n    return g.table.make(1, 2, 3, 4, 5, 6)",
        "hybridflow.roles.actor:2 g.table.make: 6 arguments have no name",
    ),
    "the locale's encoding": (
        MOMENTS,
        "from pathlib import Path\nPath('x').read_text()",
        "moments:2 Path('x').read_text",
    ),
    "the locale's encoding, opened": (MOMENTS, "import io\nfile = x.open('w')", "moments:2 x.open: names no encoding"),
    "the locale's encoding, printed": (MOMENTS, "import io\nrun(x, text=True)", "moments:2 run: names no encoding"),
    "the launcher to the rest": (
        "hybridflow.launcher.hosts",
        "from hybridflow.errors import UserError",
        "hybridflow.launcher.hosts:1 uses hybridflow.errors.UserError: the launcher needs the standard library alone",
    ),
    "the launcher to a package": ("hybridflow.launcher.hosts", "import numpy", "the standard library alone"),
    "collective": (MOMENTS, "import torch\ntorch.distributed.barrier()", "may not use torch.distributed"),
    "collective, aliased": (MOMENTS, "import torch.distributed as dist", "may not use torch.distributed"),
    "config in an algorithm": (MOMENTS, "from hybridflow.config import C", "may not use hybridflow.config"),
    "collective in the planner": ("hybridflow.reshard.plan", "from torch import distributed", "plan may not"),
}


def test_a_clean_tree_has_no_violations() -> None:
    assert violations(CLEAN) == []


@pytest.mark.parametrize(("module", "source", "message"), BROKEN.values(), ids=BROKEN)
def test_each_breach_is_found_once(module: str, source: str, message: str) -> None:
    [found] = violations(CLEAN | {module: source})
    assert message in found


def test_strangers_are_found_through_a_third_module() -> None:
    go_between = {"hybridflow.models.between": "import hybridflow.rollout.engine"}
    found = violations(CLEAN | go_between | {"hybridflow.reshard.plan": "import hybridflow.models.between"})
    assert found == [
        "hybridflow.reshard.plan imports hybridflow.rollout.engine, if not directly:"
        " reshard and rollout never import each other"
    ]


def test_read_tree_names_modules_and_packages(tmp_path: Path) -> None:
    for name in ("hybridflow/__init__.py", "launch/hosts.py", "hybridflow/roles/actor.py", "tests/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n")
    assert read_tree(tmp_path) == dict.fromkeys(["hybridflow", "hybridflow.roles.actor", "launch.hosts"], "pass\n")
