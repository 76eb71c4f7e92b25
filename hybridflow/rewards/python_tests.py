"""Python tests as what decides behind a program: comparisons assert, and what only defines tests is called.

    deciding("def check(candidate):\\n    assert candidate(1) == 2", "tests", entry_point="f")      HumanEval's
    deciding("class T(unittest.TestCase): ...", "tests")                                          BigCodeBench's
    deciding("def test_f():\\n    assert f(1) == 2", "tests")                                      pytest's
    deciding(">>> f(1)\\n2", "tests")                                                              doctest's

Where no statement that runs can fail by what the program does, each program would pass: such a text is no test.
"""

import ast
import doctest
import functools
import importlib.util
import re
import warnings
from collections.abc import Iterable, Iterator

RULE = (
    "they fail for a wrong program by assert, a comparison, a unittest.TestCase, functions test_... without arguments, "
    "doctest's >>>, or check(candidate) with a call of it or the column entry_point"
)
RUNNERS = {"unittest.main", "pytest.main"}  # they end the process
EXITS = {"exit", "quit", "sys.exit", "os._exit"}
TRUTHS = {"all", "any", "isinstance", "issubclass", "hasattr", "callable", "isclose", "allclose", "array_equal"}
CHECKS = re.compile("assert|check|compare|ensure|equal|expect|fail|must|raises|run|should|test|validate|verify")
CAUGHT = {"AssertionError", "Exception", "BaseException"}
Function = ast.FunctionDef | ast.AsyncFunctionDef

TRUE = "_given = {call}\nassert type(_given).__name__ not in ('bool', 'bool_') or _given\n"
RUN_CASES = """
import sys, unittest
_loaded = unittest.TestSuite(map(unittest.defaultTestLoader.loadTestsFromTestCase, [{names}]))
_ran = unittest.TextTestRunner(stream=sys.stderr).run(_loaded)
assert _ran.wasSuccessful() and _ran.testsRun > len(_ran.skipped)
"""
RUN_DOCTEST = """
import doctest
_found = doctest.DocTestParser().get_doctest({text!r}, globals(), "tests", None, 0)
assert not doctest.DocTestRunner(verbose=False).run(_found, out=lambda text: None).failed
"""
OF_PROGRAM = "import sys\nsys.modules['solution'] = sys.modules['__main__']\n"  # KodCode's tests import from solution


@functools.lru_cache(64)  # for the responses to a prompt: of HumanEval+ a text takes a second
def deciding(text: str, column: str, entry_point: str | None = None) -> str | None:
    """What is to follow the program; None where no statement that runs can fail by what the program does.

    entry_point: what `check(candidate)` is called with. Errors: ValueError naming the column, the text and the rule,
    for a text that fails for each program.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
        return _followed(tree, entry_point)
    except (RecursionError, MemoryError):  # too deep to look at
        return text
    except (SyntaxError, ValueError) as error:
        if isinstance(error, SyntaxError) and ">>>" in text:
            return _of_doctest(text, column)
        why = f"is no Python: {error}" if isinstance(error, SyntaxError) else str(error)
        raise ValueError(f"column {column!r}: {text[:200]!r} {why}") from error


def _followed(tree: ast.Module, entry_point: str | None) -> str | None:
    modules = _modules(tree)
    missing = [name for name in sorted(modules - {"solution", "__main__"}) if not _is_installed(name)]
    if missing:
        raise ValueError(f"imports {missing[0]}, which is not installed here")
    tests = _Tests(tree)
    calls = tests.calls(entry_point)
    if not calls and not tests.can_fail(tree.body):
        return None
    return f"{OF_PROGRAM if 'solution' in modules else ''}{ast.unparse(_Asserting(tests).visit(tree))}\n{calls}"


def _of_doctest(text: str, column: str) -> str | None:
    try:
        examples = doctest.DocTestParser().get_examples(text)
    except ValueError as error:
        raise ValueError(f"column {column!r}: {text[:200]!r} is no doctest: {error}") from error
    return RUN_DOCTEST.format(text=text) if any(example.want for example in examples) else None


class _Tests:
    """What a text defines, and whether it can fail. says: functions that fail or give something when called."""

    def __init__(self, tree: ast.Module) -> None:
        nodes, own = list(ast.walk(tree)), list(_running(tree.body))
        self.aliases = dict(_imported(nodes))
        self.functions = {part.name: part for part in own if isinstance(part, Function)}
        self.classes = {part.name: part for part in own if isinstance(part, ast.ClassDef)}
        names = [node for node in nodes if isinstance(node, ast.Name)]
        self.read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
        self.known = {node.id for node in names if isinstance(node.ctx, ast.Store)} | {*self.aliases, *self.classes}
        lambdas = [part for part in own if isinstance(part, ast.Assign) and isinstance(part.value, ast.Lambda)]
        self.says = {target.id for part in lambdas for target in part.targets if isinstance(target, ast.Name)}
        while new := {name for name, one in self.functions.items() if name not in self.says and self._tells(one)}:
            self.says |= new

    def calls(self, entry_point: str | None) -> str:
        """Of what the text defines as tests and does not call. Errors: ValueError for what nothing could call."""
        made = ""
        for name, one in self.functions.items():
            if name in self.read or name not in self.says:
                continue
            if name == "check" and entry_point and _num_needed(one) == 1:
                made += TRUE.format(call=f"check({entry_point})")
            elif name.startswith("test"):
                if _num_needed(one) or isinstance(one, ast.AsyncFunctionDef):
                    raise ValueError(f"has {name}, which is async or has arguments that nothing gives; {RULE}")
                made += TRUE.format(call=f"{name}()")
        cases = list[str]()
        for name, kind in self.classes.items():
            bases = map(self.name_of, kind.bases)
            cases += [name] if any(base.endswith("TestCase") or base in cases for base in bases) else []
        methods = [part.name for kind in self.classes.values() for part in kind.body if isinstance(part, Function)]
        if cases and any(name.startswith("test") for name in methods):
            made += RUN_CASES.format(names=", ".join(cases))
        for name in self.classes.keys() - self.read - {*cases}:
            if name.startswith("Test"):
                raise ValueError(f"has the class {name}, which is no unittest.TestCase; {RULE}")
        return made

    def called(self, node: ast.AST) -> str:
        return self.name_of(node.func) if isinstance(node, ast.Call) else ""

    def name_of(self, node: ast.expr) -> str:
        """As `unittest.main` wherever that was imported from; .main of what is no name."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id)
        return f"{self.name_of(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""

    def can_fail(self, body: Iterable[ast.stmt]) -> bool:
        """Whether one of these statements can, by what the program does."""
        return any(map(self._can_fail, body))

    def _can_fail(self, part: ast.stmt) -> bool:
        match part:
            case ast.Assert(test=test):
                return not _is_true(test)
            case ast.Raise() | ast.While():  # which may not end
                return True
            case ast.Expr(value=value):
                return _compares(value) or self._checks(value)
            case ast.Try(handlers=handlers):
                swallows = any(_catches_all(one) and not self.can_fail(one.body) for one in handlers)
                others = [*part.orelse, *part.finalbody, *(each for one in handlers for each in one.body)]
                return self.can_fail(others if swallows else [*part.body, *others])
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                return any(self._checks(item.context_expr) for item in items) or self.can_fail(body)
            case ast.If() | ast.For() | ast.AsyncFor():
                return self.can_fail([*part.body, *part.orelse])
        return False

    def _tells(self, one: Function) -> bool:
        returns = any(isinstance(part, ast.Return) and part.value is not None for part in _running(one.body))
        return returns or self.can_fail(one.body)

    def _checks(self, value: ast.expr) -> bool:
        """Whether a call in it fails by its name: of the text's own functions, of a package, or of a method."""
        names = {self.called(node) for node in ast.walk(value)}
        by_name = [name for name in names if CHECKS.search(name) and not name.startswith("doctest.")]
        return bool(names & (self.says | EXITS)) or any("." in one or {one, "*"} & self.known for one in by_name)


class _Asserting(ast.NodeTransformer):
    """Has comparisons assert, and the text go on where it would end the process."""

    def __init__(self, tests: _Tests) -> None:
        self._tests, self._depth = tests, 0

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.stmt]:
        value, name = node.value, self._tests.called(node.value)
        given = value.args[0] if isinstance(value, ast.Call) and value.args else ast.Constant(None)
        if name in RUNNERS or (name in EXITS and self._tests.called(given) in RUNNERS):
            return ast.Pass()
        if name in EXITS and not self._depth:
            return ast.Assert(ast.UnaryOp(ast.Not(), given))
        if name in self._tests.says and not self._depth:
            return ast.parse(TRUE.format(call=ast.unparse(value))).body
        return ast.Assert(value) if _compares(value) else node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """assert (f(1) == 2, "words") is true of any pair."""
        match node.test:
            case ast.Tuple(elts=[first, *_]) if node.msg is None and _compares(first):
                return ast.Assert(first)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        """One of __future__ stands first in a file, or nowhere."""
        return ast.Pass() if node.module == "__future__" else node

    def visit_FunctionDef(self, node: Function) -> ast.AST:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    visit_AsyncFunctionDef = visit_FunctionDef


def _running(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All of these statements, but what stands within functions and classes."""
    for part in body:
        yield part
        if not isinstance(part, Function | ast.ClassDef):
            inside = (ast.stmt, ast.ExceptHandler)
            yield from _running(each for each in ast.iter_child_nodes(part) if isinstance(each, inside))


def _imported(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Each name that is imported, and what it is in full."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from ((one.asname or one.name, package + one.name) for one in node.names)


def _modules(tree: ast.Module) -> set[str]:
    """That the text imports in any case, by the first word."""
    plain = {alias.name for part in tree.body if isinstance(part, ast.Import) for alias in part.names}
    others = {part.module or "" for part in tree.body if isinstance(part, ast.ImportFrom) and not part.level}
    return {name.partition(".")[0] for name in plain | others}


@functools.cache
def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _num_needed(one: Function) -> int:
    return len(one.args.posonlyargs) + len(one.args.args) - len(one.args.defaults)


def _compares(value: ast.expr) -> bool:
    """Whether it is true or false, and of no effect where nobody looks at it."""
    match value:
        case ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return not _is_true(value)
        case ast.BoolOp(values=values):
            return all(map(_compares, values))
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in TRUTHS
    return False


def _catches_all(handler: ast.ExceptHandler) -> bool:
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(one is None or (isinstance(one, ast.Name) and one.id in CAUGHT) for one in types)


def _is_true(test: ast.expr) -> bool:
    """Whatever a program does."""
    try:
        return bool(ast.literal_eval(test))
    except (ValueError, TypeError, RecursionError, MemoryError):
        return not any(isinstance(node, ast.Name) for node in ast.walk(test))
