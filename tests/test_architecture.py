"""The shape of the package, read from its syntax trees: levels, cycles, sizes, constructs.

Every rule is a function from the modules to a list of violations. It runs once on the package,
where the list must be empty, and on small broken packages, where it must not be.
"""

import ast
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "gradtrail"

# Lowest level first. A room imports itself and strictly lower levels: rooms of one level are
# siblings. docs/architecture.md shows the same list, highest first.
LEVELS = (
    ("errors", "options", "machine", "files", "distributed", "progress", "reference"),
    ("factors",),
    ("hooks", "store", "kronecker"),
    ("callbacks",),
    ("attribution",),
    ("interchange", "evaluation", "cli"),
)

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 6
MAX_PUBLIC_METHODS = 12

# Qualified name -> why it may have more than six parameters. The extra ones are keyword-only.
MANY_PARAMETERS: dict[str, str] = {
    "gradtrail.attribution.api.attribute": "the one-call entry point",
    "gradtrail.attribution.api.self_influence": "the one-call entry point",
    "gradtrail.attribution.cached.cache": "the one-call entry point",
    "gradtrail.attribution.plan.plan": "takes what attribute takes",
    "gradtrail.callbacks.trainer.GradTrailCallback.__init__": "takes what HookManager takes",
    "gradtrail.attribution.bound.AbstractBoundAttributor.__init__": "as attribute",
    "gradtrail.attribution.from_cache.attribute_from_cache": "the one-call entry point",
    "gradtrail.attribution.from_cache.self_influence_from_cache": "the one-call entry point",
    "gradtrail.attribution.preconditioned.cache_preconditioned_query": "as attribute_from_cache",
    "gradtrail.attribution.gauss_newton.gauss_newton_solve": "a linear system: data, loss, "
    "right-hand sides, preconditioner, options",
    "gradtrail.attribution.search.search": "takes what attribute_from_cache takes of stores",
    "gradtrail.hooks.manager.HookManager.__init__": "spelled out by its issue, keyword-only",
    "gradtrail.callbacks.selection.DataSelectionCallback.__init__": "spelled out by its issue",
    "gradtrail.callbacks.selection_two_pass.TwoPassSelection.__init__": "takes the same options",
    "gradtrail.interchange.controls.placebo_accuracy": "takes what interchange_accuracy takes",
    "gradtrail.interchange.fit.fit_das": "spelled out by its issue, keyword-only",
    "gradtrail.interchange.passes.interchange_accuracy": "spelled out by its issue",
    "gradtrail.interchange.passes.interchange_logits": "spelled out by its issue",
    "gradtrail.interchange.projection.ProjectionQuery.__init__": "direction, basis and labels of "
    "its issue beside model, inputs and forward",
    "gradtrail.interchange.query.InterchangeQuery.__init__": "spelled out by its issue",
    "gradtrail.attribution.trajectory_replay.attribute_by_replay": "the one-call entry point",
}

FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
FORBIDDEN_CALLS = {"print", "torch.load", "torch.save"}
OPTIONAL_PACKAGES = ("transformers", "matplotlib", "pandas", "scipy", "datasets", "accelerate")


@dataclass(frozen=True)
class Module:
    """One source file of the package.

    Attributes:
        name: Dotted name; a package's name stands for its ``__init__.py``.
        path: Where the file lies.
        tree: Its syntax tree.
        num_lines: Lines of the file.
    """

    name: str
    path: Path
    tree: ast.Module
    num_lines: int

    @property
    def is_package(self):
        return self.path.name == "__init__.py"

    @property
    def room(self):
        """First name below the package; empty for ``gradtrail/__init__.py``."""
        return self.name.split(".")[1] if "." in self.name else ""


def read_modules(root):
    modules = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        modules[name] = Module(name, path, ast.parse(text), len(text.splitlines()))
    return modules


# ---------------------------------------------------------------- imports


def absolute_base(module, node):
    """Dotted name that an ``ImportFrom`` node imports from, with its leading dots resolved."""
    if not node.level:
        return node.module or ""
    package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    package = package[: len(package) - (node.level - 1)]
    return ".".join(package + ([node.module] if node.module else []))


def imported_names(module):
    """Every (line, dotted name) the file imports, at any depth, by ``import_module`` too."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(module, node)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("import_module"):
            constants = [a.value for a in node.args if isinstance(a, ast.Constant)]
            yield from ((node.lineno, str(value)) for value in constants)


def internal_imports(module, modules):
    """Every (line, module of the package) the file imports: the longest prefix that is a module."""
    for line, name in imported_names(module):
        parts = name.split(".")
        if parts[0] != PACKAGE:
            continue
        prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        yield line, next((prefix for prefix in prefixes if prefix in modules), PACKAGE)


def level_of(room):
    return next((number for number, rooms in enumerate(LEVELS, 1) if room in rooms), None)


def unlisted_rooms(modules):
    rooms = {module.room for module in modules.values()} - {""}
    return [f"room {room!r} is in no level" for room in sorted(rooms) if level_of(room) is None]


def level_violations(modules):
    found = []
    for module in modules.values():
        for line, target in internal_imports(module, modules):
            room = modules[target].room if target in modules else ""
            if module.room in {"", room}:
                continue
            own, other = level_of(module.room), level_of(room)
            if own is None or other is None or other >= own:
                found.append(f"{module.name}:{line} (level {own}) imports {target} (level {other})")
    return found


def import_cycles(modules):
    """Cycles of the import graph, each as ``a -> b -> a``."""
    graph = {
        name: sorted({target for _, target in internal_imports(module, modules)} & set(modules))
        for name, module in modules.items()
    }
    found, done = [], set()

    def visit(name, trail):
        if name in trail:
            found.append(" -> ".join([*trail[trail.index(name) :], name]))
        elif name not in done:
            for target in graph[name]:
                visit(target, [*trail, name])
            done.add(name)

    for name in graph:
        visit(name, [])
    return found


# ---------------------------------------------------------------- sizes


def definitions(tree, prefix, parent=None):
    """Every (qualified name, enclosing definition, node) of the functions and classes in a tree."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield f"{prefix}.{node.name}", parent, node
            yield from definitions(node, f"{prefix}.{node.name}", node)
        else:
            yield from definitions(node, prefix, parent)


def functions(modules):
    for module in modules.values():
        for name, parent, node in definitions(module.tree, module.name):
            if not isinstance(node, ast.ClassDef):
                yield name, parent, node


def is_docstring(node):
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def num_function_lines(node):
    """Lines from ``def`` to the end, without the function's own docstring."""
    lines = node.end_lineno - node.lineno + 1
    if is_docstring(node.body[0]):
        lines -= node.body[0].end_lineno - node.body[0].lineno + 1
    return lines


def num_parameters(parent, node):
    """Parameters a caller may give: ``self`` and ``cls`` do not count."""
    decorators = {dotted(decorator) for decorator in node.decorator_list}
    arguments = node.args
    count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
    count += (arguments.vararg is not None) + (arguments.kwarg is not None)
    return count - (isinstance(parent, ast.ClassDef) and "staticmethod" not in decorators)


def long_modules(modules):
    return [
        f"{module.name} has {module.num_lines} lines, at most {MAX_MODULE_LINES}"
        for module in modules.values()
        if module.num_lines > MAX_MODULE_LINES
    ]


def long_functions(modules):
    return [
        f"{name} has {num_function_lines(node)} lines, at most {MAX_FUNCTION_LINES}"
        for name, _, node in functions(modules)
        if num_function_lines(node) > MAX_FUNCTION_LINES
    ]


def functions_of_many_parameters(modules):
    return {
        name: num_parameters(parent, node)
        for name, parent, node in functions(modules)
        if num_parameters(parent, node) > MAX_PARAMETERS
    }


def wide_functions(modules):
    return [
        f"{name} has {count} parameters, at most {MAX_PARAMETERS}"
        for name, count in functions_of_many_parameters(modules).items()
        if name not in MANY_PARAMETERS
    ]


def large_classes(modules):
    found = []
    for module in modules.values():
        for name, _, node in definitions(module.tree, module.name):
            if isinstance(node, ast.ClassDef):
                members = (
                    n for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
                )
                public = {member.name for member in members if not member.name.startswith("_")}
                if len(public) > MAX_PUBLIC_METHODS:
                    found.append(
                        f"{name} has {len(public)} public methods, at most {MAX_PUBLIC_METHODS}"
                    )
    return found


# ---------------------------------------------------------------- constructs


def dotted(node):
    """``a.b.c`` for a name or an attribute chain, empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and dotted(node.value):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def forbidden_in_node(node):
    if isinstance(node, ast.Assert):
        return "assert"
    if isinstance(node, ast.ExceptHandler) and node.type is None:
        return "bare except"
    if isinstance(node, ast.Call):
        if dotted(node.func) in FORBIDDEN_CALLS:
            return f"{dotted(node.func)}()"
        if any(k.arg == "allow_pickle" and not is_false(k.value) for k in node.keywords):
            return "allow_pickle"
    return None


def is_false(node):
    return isinstance(node, ast.Constant) and node.value is False


def forbidden_constructs(modules):
    found = []
    for module in modules.values():
        for node in ast.walk(module.tree):
            if construct := forbidden_in_node(node):
                found.append(f"{module.name}:{node.lineno} uses {construct}")
        for line, name in imported_names(module):
            if name.split(".")[0] in FORBIDDEN_IMPORTS or name in FORBIDDEN_CALLS:
                found.append(f"{module.name}:{line} imports {name}")
    return found


def may_stand_in_init(node, allowed):
    if isinstance(node, (ast.Import, ast.ImportFrom)) or is_docstring(node):
        return True
    if not isinstance(node, (ast.Assign, ast.AnnAssign)):
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {dotted(target) for target in targets} <= allowed


def busy_inits(modules):
    found = []
    for module in modules.values():
        if module.is_package:
            allowed = {"__all__"} if module.room else {"__all__", "__version__"}
            found += [
                f"{module.name}/__init__.py:{node.lineno} holds more than imports and __all__"
                for node in module.tree.body
                if not may_stand_in_init(node, allowed)
            ]
    return found


RULES = (
    unlisted_rooms,
    level_violations,
    import_cycles,
    long_modules,
    long_functions,
    wide_functions,
    large_classes,
    forbidden_constructs,
    busy_inits,
)


# ---------------------------------------------------------------- the package keeps every rule


@pytest.fixture(scope="module")
def modules():
    return read_modules(ROOT)


def test_the_package_is_read(modules):
    assert PACKAGE in modules


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps(rule, modules):
    found = rule(modules)
    assert not found, "\n".join(found)


def test_allow_list_is_needed_and_explained(modules):
    unneeded = set(MANY_PARAMETERS) - set(functions_of_many_parameters(modules))
    unexplained = {name for name, reason in MANY_PARAMETERS.items() if not reason.strip()}
    assert not unneeded, f"no such function, or it has few parameters: {sorted(unneeded)}"
    assert not unexplained, f"reason missing: {sorted(unexplained)}"


def test_no_optional_package_is_imported():
    code = f"import sys, {PACKAGE}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not set(OPTIONAL_PACKAGES) & set(done.stdout.split())


def test_documented_levels_are_the_tested_ones():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```levels\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1, "docs/architecture.md must hold one block that opens with ```levels"
    documented = [line.split() for line in blocks[0].splitlines()]
    expected = [[f"L{number}", *rooms] for number, rooms in enumerate(LEVELS, 1)]
    assert documented == expected[::-1]


# ---------------------------------------------------------------- every rule can fail

BODY = "    x = 1\n" * 60
METHODS = "\n".join(f"    def m{number}(self): ..." for number in range(13))

# id: (rule, {file: source}, part of the violation)
BROKEN = {
    "room without level": (unlisted_rooms, {"extra.py": ""}, "'extra'"),
    "upward import": (
        level_violations,
        {"factors/__init__.py": "import gradtrail.hooks", "hooks/__init__.py": ""},
        "gradtrail.factors:1 (level 2) imports gradtrail.hooks (level 3)",
    ),
    "import of a sibling": (
        level_violations,
        {"hooks/__init__.py": "from gradtrail import store", "store/__init__.py": ""},
        "imports gradtrail.store",
    ),
    "relative import in a function": (
        level_violations,
        {"factors/a.py": "def f():\n    from ..hooks import b", "hooks/b.py": ""},
        "gradtrail.factors.a:2 (level 2) imports gradtrail.hooks.b (level 3)",
    ),
    "import by name": (
        level_violations,
        {"errors.py": "import importlib\nimportlib.import_module('gradtrail.factors')"}
        | {"factors/__init__.py": ""},
        "imports gradtrail.factors",
    ),
    "import of the top": (
        level_violations,
        {"hooks/__init__.py": "from gradtrail import attribute"},
        "imports gradtrail (level None)",
    ),
    "cycle": (
        import_cycles,
        {"hooks/a.py": "from . import b", "hooks/b.py": "def f():\n    from .a import g"},
        "gradtrail.hooks.a -> gradtrail.hooks.b -> gradtrail.hooks.a",
    ),
    "cycle through the room": (
        import_cycles,
        {"hooks/__init__.py": "from .a import g", "hooks/a.py": "from gradtrail.hooks import h"},
        "gradtrail.hooks -> gradtrail.hooks.a -> gradtrail.hooks",
    ),
    "module of 401 lines": (long_modules, {"errors.py": "\n" * 401}, "401 lines"),
    "function of 61 lines": (
        long_functions,
        {"errors.py": f'def f():\n    """One.\n\n    Two.\n    """\n{BODY}'},
        "gradtrail.errors.f has 61 lines",
    ),
    "method of 61 lines": (
        long_functions,
        {"errors.py": "class C:\n    def f(self):\n" + BODY.replace("    x", "        x")},
        "gradtrail.errors.C.f has 61 lines",
    ),
    "seven parameters": (
        wide_functions,
        {"errors.py": "class C:\n    def f(self, a, b, *c, d, e, f, g): ..."},
        "gradtrail.errors.C.f has 7 parameters",
    ),
    "thirteen methods": (large_classes, {"errors.py": f"class C:\n{METHODS}"}, "13 public"),
    "assert": (forbidden_constructs, {"errors.py": "assert True"}, "uses assert"),
    "print": (forbidden_constructs, {"cli.py": "print(1)"}, "uses print()"),
    "bare except": (forbidden_constructs, {"cli.py": "try: f()\nexcept: pass"}, "bare except"),
    "pickle": (forbidden_constructs, {"cli.py": "def f():\n    import pickle"}, "imports pickle"),
    "from pickle": (forbidden_constructs, {"cli.py": "from pickle import loads"}, "pickle.loads"),
    "torch.load": (forbidden_constructs, {"cli.py": "torch.load('x')"}, "uses torch.load()"),
    "load of torch": (forbidden_constructs, {"cli.py": "from torch import load"}, "torch.load"),
    "numpy pickle": (
        forbidden_constructs,
        {"cli.py": "np.load('x', allow_pickle=True)"},
        "uses allow_pickle",
    ),
    "code in an init": (busy_inits, {"hooks/__init__.py": "'Doc.'\nx = 1"}, "__init__.py:2"),
    "version in a room": (busy_inits, {"hooks/__init__.py": "__version__ = '1'"}, "__init__.py:1"),
}

KEPT = {
    "__init__.py": "'Doc.'\nfrom gradtrail.factors import x\n__all__ = ['x']\n__version__ = '1'",
    "errors.py": "def f(a, b, c, d, e, f): ...\n"
    + f'def g():\n    """One.\n\n    Two."""\n{BODY[10:]}',
    "factors/__init__.py": "from .linear import x\nfrom gradtrail.errors import E",
    "factors/linear.py": "from ..errors import E\nfrom . import _gram",
    "factors/_gram.py": "import torch.nn\nnp.load('x', allow_pickle=False)",
    "hooks/__init__.py": "from gradtrail.factors import x\nimport gradtrail.hooks.manager as m",
    "hooks/manager.py": "class C:\n    if True:\n        def f(self, a, b, c, d, e, f): ...",
    "attribution/__init__.py": "from gradtrail import hooks, factors",
}


def write_package(root, files):
    for name, source in {"__init__.py": "", **files}.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return read_modules(root)


@pytest.mark.parametrize("case", BROKEN)
def test_rule_finds(case, tmp_path):
    rule, files, expected = BROKEN[case]
    found = rule(write_package(tmp_path, files))
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_accepts_a_sound_package(rule, tmp_path):
    assert rule(write_package(tmp_path, KEPT)) == []


def test_every_rule_has_a_broken_case():
    assert {rule for rule, _, _ in BROKEN.values()} == set(RULES)
