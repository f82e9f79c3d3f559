"""Where things stand: each folder is one stage that the data passes through, and imports only from those before it.

And what they are called: a public name means one thing in all of the packages.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# In the order in which they may import: each from itself and from those before it. Whoever reads a file then knows it
# by what stands above it in this list, and can change it without a look at what stands below; and what is registered,
# such as a rule or a lowering, is there as soon as its own package is imported, whichever other one is.
STAGES = (
    "jax_impl/program",  # programs as data: needs nothing but JAX
    "jax_impl/factors",  # sums over examples, found in a program
    "jax_impl/batches",  # how a batch is cut and joined
    "jax_impl",  # the transforms, one a file
    "bridge/base",  # what all of the bridge needs: errors, private parts of torch, whose code is the user's
    "bridge/memory",  # tensors and arrays, before any function is looked at
    "bridge/watch",  # what a function reads, before it is recorded
    "bridge/lowerings",  # ops in JAX, for whoever computes a recording
    "bridge/record",  # a function as a graph
    "bridge/effects",  # what a recorded function leaves behind
    "bridge/derive",  # recordings as primitives of JAX, with the recordings behind their derivatives
    "bridge/call",  # compiled programs as functions of torch
    "bridge",  # the public functions
    "torch_api/compare",  # a tool beside the transforms, which its tests and theirs use
    "torch_api",  # the torch faces of the transforms
)

# What a package may not load, though it stands before or outside of the list, and why.
KEPT_OUT = {
    "jax_impl": ("torch", "torchax", "torch2jax"),  # whoever uses JAX alone need not have torch, nor wait for it
}

# Functions here have the names of the torch functions that they stand for, as the lowerings have those of the ops.
RECORDED = ("bridge.record.functions", "bridge.record.losses", "bridge.record.embeddings")


def modules_in(root: Path) -> dict[str, Path]:
    """Name every module of the packages as seen from the root: ``bridge.memory`` for the ``__init__`` of the folder."""
    packages = {stage.partition("/")[0] for stage in STAGES}
    files = [file for package in sorted(packages) for file in sorted((root / package).rglob("*.py"))]
    return {".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imports_of(name: str, modules: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """List the lines with imports, wherever they stand in the file, each with the module that it loads."""
    own = name.split(".")
    package = own if modules[name].name == "__init__.py" else own[:-1]
    for node in ast.walk(ast.parse(modules[name].read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.removeprefix("microtome.")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join([*start, *(node.module or "").split(".")]).strip(".").removeprefix("microtome.")
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield node.lineno, inner if inner in modules else source


def faults(root: Path) -> list[str]:
    """Find imports from a later stage and of what is kept out, folders that are no stage, and modules in a circle."""
    modules = modules_in(root)
    stages = {n: file.parent.relative_to(root).as_posix() for n, file in modules.items()}
    found = [f"{stage}/ is not in the list of stages" for stage in sorted({*stages.values()} - {*STAGES})]
    found += [f"{stage}/ is in the list of stages, and is not there" for stage in STAGES if not (root / stage).is_dir()]
    graph: dict[str, set[str]] = {}
    for name, stage in stages.items():
        graph[name] = set()
        for line, target in imports_of(name, modules):
            place = f"{modules[name].relative_to(root).as_posix()}:{line}"
            if target.partition(".")[0] in KEPT_OUT.get(name.partition(".")[0], ()):
                found.append(f"{place} imports {target}, which is kept out")
            if target not in modules:
                continue
            graph[name].add(target)
            if {stage, stages[target]} <= {*STAGES} and STAGES.index(stage) < STAGES.index(stages[target]):
                found.append(f"{place} imports {target}: {stages[target]}/ stands after {stage}/")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found.append(f"in a circle: {' imports '.join(reversed(error.args[1]))}")
    return found


def unexplained(root: Path) -> list[str]:
    """Find the folders whose ``__init__`` does not say what they are for."""
    texts = {stage: (root / stage / "__init__.py") for stage in STAGES}
    said = {s: ast.get_docstring(ast.parse(file.read_text())) if file.exists() else None for s, file in texts.items()}
    return [stage for stage, text in said.items() if len((text or "").split()) < 4]


def statements(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """List the statements of a module, with those under a condition, a ``try`` or a ``with``."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.ExceptHandler, ast.With)):
            yield from statements(list(ast.iter_child_nodes(node)))


def definitions(file: Path) -> Iterator[tuple[str, ast.AST]]:
    """List the public names that a module defines. A type variable is no thing, nor ``X = other.X`` another one."""
    for node in statements(ast.parse(file.read_text()).body):
        names: list[str] = []
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = [node.name]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            if isinstance(node.value, ast.Call) and ast.unparse(node.value.func).endswith("TypeVar"):
                continue
            parts = [n for t in (node.targets if isinstance(node, ast.Assign) else [node.target]) for n in ast.walk(t)]
            same = node.value.attr if isinstance(node.value, ast.Attribute) else None
            names = [n.id for n in parts if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.id != same]
        yield from ((name, node) for name in names if not name.startswith("_"))


def exports(package: str, modules: dict[str, Path]) -> set[tuple[str, str]]:
    """List what the ``__init__`` of a package imports from its own modules, each name with its module."""
    tree = ast.parse(modules[package].read_text())
    found = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.level == 1]
    return {(alias.name, f"{package}.{node.module}") for node in found for alias in node.names}


def named_twice(root: Path) -> list[str]:
    """Find the public names that two modules define, which whoever searches for one then finds both of.

    A public transform may be in both ``jax_impl`` and ``torch_api``, and a torch function that is recorded in a way of
    its own may be called like a lowering.
    """
    modules = modules_in(root)
    found = [(name, module, node) for module, file in modules.items() for name, node in definitions(file)]
    lowered = {
        name
        for name, module, node in found
        if module.startswith("bridge.lowerings.")
        for decorator in getattr(node, "decorator_list", [])
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "lowering"
    }
    in_jax, faces = {name for name, _ in exports("jax_impl", modules)}, exports("torch_api", modules)
    places: dict[str, dict[str, int]] = {}
    for name, module, node in found:
        if not ((module in RECORDED and name in lowered) or ((name, module) in faces and name in in_jax)):
            places.setdefault(name, {}).setdefault(modules[module].relative_to(root).as_posix(), node.lineno)
    return [
        f"{name} is in {' and in '.join(f'{file}:{line}' for file, line in where.items())}"
        for name, where in sorted(places.items())
        if len(where) > 1
    ]


def test_each_stage_imports_only_from_those_before_it() -> None:
    assert len(modules_in(ROOT)) > 100
    assert faults(ROOT) == []


def test_each_folder_says_what_it_is_for() -> None:
    assert unexplained(ROOT) == []


def test_a_public_name_means_one_thing() -> None:
    assert named_twice(ROOT) == []


# What the checks have to find: the text of a file, by its name, and the words of the fault.
PLANTED = {
    "from a later stage": (
        {"bridge/memory/values.py": "from ..call import made\n"},
        "bridge/memory/values.py:1 imports bridge.call: bridge/call/ stands after bridge/memory/",
    ),
    "a name in a later stage": (
        {"bridge/memory/values.py": "from ..call.made import f\n", "bridge/call/made.py": "f = 1\n"},
        "bridge/memory/values.py:1 imports bridge.call.made: ",
    ),
    "a module as a name": (
        {"bridge/memory/values.py": "\nfrom ..call import made\n", "bridge/call/made.py": ""},
        "bridge/memory/values.py:2 imports bridge.call.made: ",
    ),
    "within a function": (
        {"jax_impl/program/trees.py": "def f():\n    from .. import clipping\n", "jax_impl/clipping.py": ""},
        "jax_impl/program/trees.py:2 imports jax_impl.clipping: ",
    ),
    "by the package's full name": (
        {"bridge/lift.py": "import microtome.torch_api.clipping\n", "torch_api/clipping.py": ""},
        "bridge/lift.py:1 imports torch_api.clipping: torch_api/ stands after bridge/",
    ),
    "from the full name": (
        {"bridge/lift.py": "from microtome.torch_api import clipping\n", "torch_api/clipping.py": ""},
        "bridge/lift.py:1 imports torch_api.clipping: ",
    ),
    "the bridge in jax_impl": (
        {"jax_impl/clipping.py": "from ..bridge.memory import values\n", "bridge/memory/values.py": ""},
        "jax_impl/clipping.py:1 imports bridge.memory.values: ",
    ),
    "torch in jax_impl": ({"jax_impl/clipping.py": "import torch.nn as nn\n"}, "imports torch.nn, which is kept out"),
    "from torch in jax_impl": ({"jax_impl/clipping.py": "from torch import nn\n"}, "imports torch, which is kept out"),
    "a circle": (
        {"bridge/watch/walk.py": "from . import keys\n", "bridge/watch/keys.py": "from .walk import a\n"},
        "in a circle: bridge.watch.",
    ),
    "a folder of its own": ({"bridge/more/__init__.py": ""}, "bridge/more/ is not in the list of stages"),
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """All stages, with nothing in them but what they are for."""
    for stage in STAGES:
        (tmp_path / stage).mkdir(parents=True, exist_ok=True)
        (tmp_path / stage / "__init__.py").write_text('"""What comes in and out."""\n')
    return tmp_path


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_is_found(name: str, tree: Path) -> None:
    assert faults(tree) == []
    files, words = PLANTED[name]
    for file, text in files.items():
        (tree / file).parent.mkdir(exist_ok=True)
        (tree / file).write_text(text)
    (found,) = faults(tree)
    assert words in found


def test_what_is_in_order_is_no_fault(tree: Path) -> None:
    (tree / "bridge/call/made.py").write_text(
        "import torch\nfrom ...jax_impl import clipping\nfrom ..memory import a\n"
    )
    (tree / "jax_impl/clipping.py").write_text("import jax\nfrom .program import trees\nfrom . import scanning\n")
    (tree / "jax_impl/scanning.py").write_text("")
    assert faults(tree) == []


def test_a_missing_folder_and_a_missing_docstring_are_found(tree: Path) -> None:
    (tree / "bridge/watch/__init__.py").write_text('"""TODO."""\n')
    (tree / "bridge/derive/__init__.py").unlink()
    assert unexplained(tree) == ["bridge/watch", "bridge/derive"]
    (tree / "bridge/derive").rmdir()
    assert faults(tree) == ["bridge/derive/ is in the list of stages, and is not there"]


LOWERED = '@lowering("aten.put")\ndef put(x): ...\n'
FACES = {f"{p}/__init__.py": '"""All of the transforms."""\nfrom .cut import cut\n' for p in ("jax_impl", "torch_api")}

# Two files, and the name that both define; "" where that is in order.
NAMES = {
    "functions": ({"bridge/watch/a.py": "\ndef f(): ...\n", "bridge/call/b.py": "def f(): ...\n"}, "f"),
    "a class and a type": ({"bridge/watch/a.py": "class F: ...\n", "jax_impl/b.py": "F: TypeAlias = int\n"}, "F"),
    "a part of a tuple": ({"bridge/watch/a.py": "a, F = 1, 2\n", "jax_impl/b.py": "F = b = 3\n"}, "F"),
    "under conditions": (
        {
            "jax_impl/a.py": "if 1:\n    pass\nelse:\n    f = 1\n",
            "bridge/b.py": "try:\n    pass\nexcept E:\n    f = 1\n",
        },
        "f",
    ),
    "an op and no op": ({"bridge/lowerings/a.py": LOWERED, "bridge/call/b.py": "def put(): ...\n"}, "put"),
    "two lowerings": ({"bridge/lowerings/a.py": LOWERED, "bridge/lowerings/b.py": LOWERED}, "put"),
    "no lowering": ({"bridge/lowerings/a.py": "f = 1\n", "bridge/record/losses.py": "def f(): ...\n"}, "f"),
    "beside the public ones": ({**FACES, "jax_impl/cut.py": "cut = 1\n", "torch_api/calls.py": "cut = 2\n"}, "cut"),
    "public in one": ({"jax_impl/cut.py": "cut = 1\n", "torch_api/cut.py": "cut = 2\n"}, "cut"),
    "public in both": ({**FACES, "jax_impl/cut.py": "cut = 1\n", "torch_api/cut.py": "cut = 2\n"}, ""),
    "recorded and lowered": ({"bridge/lowerings/a.py": LOWERED, "bridge/record/losses.py": "def put(x): ...\n"}, ""),
    "type variables": ({"jax_impl/a.py": "T = TypeVar('T')\n", "bridge/b.py": "T = typing.TypeVar('T')\n"}, ""),
    "other's": ({"jax_impl/a.py": "aten = ops.aten\n", "bridge/b.py": "aten: Any = ops.aten\n"}, ""),
    "imported": ({"jax_impl/a.py": "f = 1\n", "bridge/b.py": "from ..jax_impl.a import f\n"}, ""),
    "private or within": ({"jax_impl/a.py": "_f = 1\n", "bridge/b.py": "_f = 2\nclass A:\n    f = 1\n"}, ""),
    "in a loop": ({"jax_impl/a.py": "f = 1\n", "bridge/b.py": "a = [f for f in b]\nb[f] = 1\n"}, ""),
    "twice in one module": ({"jax_impl/a.py": "if 1:\n    f = 1\nelse:\n    f = 2\n"}, ""),
}


@pytest.mark.parametrize("kind", NAMES)
def test_a_name_of_two_things_is_found(kind: str, tree: Path) -> None:
    files, name = NAMES[kind]
    for file, text in files.items():
        (tree / file).write_text(text)
    assert [found.partition(" is in ")[0] for found in named_twice(tree)] == ([name] if name else [])


def test_a_name_of_two_things_is_shown_with_its_places(tree: Path) -> None:
    for file in ("bridge/call/b.py", "jax_impl/a.py"):
        (tree / file).write_text("\nf = 1\n")
    assert named_twice(tree) == ["f is in bridge/call/b.py:2 and in jax_impl/a.py:2"]
