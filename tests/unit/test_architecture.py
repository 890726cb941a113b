"""Rules about the source of the library: which way imports go, where state may live, how large things are."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torch_gtp

PACKAGE = Path(torch_gtp.__file__).parent

# From the bottom up. A module imports only from modules that stand before it.
ORDER = [
    "_policy", "_dtensor_layout", "_collectives", "_buffers", "_chain", "_state", "_runtime", "_autograd",
    "_replicate", "_first_call", "_hooks", "_linear", "_freshness", "_access", "_tp_styles", "_module", "_composable",
    "_init", "_mesh", "clip", "debug",
    "optim._newton_schulz", "optim._plan", "optim._pipeline", "optim._groups", "optim._muon",
    "optim._split", "optim._shard_states", "optim",
    "checkpoint._files", "checkpoint._safetensors", "checkpoint._dcp", "checkpoint._hf", "checkpoint",
    "__init__",
]  # fmt: skip
ONLY_TORCH = {"_tp_styles", "_chain"}
OPTIONAL = {("checkpoint._safetensors", "safetensors")}  # imported where it is needed, never at the top of a module
PUBLIC_MODULES = [name for name in ORDER if not name.startswith("_") and "._" not in name]

MAX_FILE_LINES = 550
MAX_FUNCTION_LINES = 70

MUTABLE_TYPES = {
    "list", "dict", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "deque", "ChainMap",
    "WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "local",
}  # fmt: skip
# Renamed between the releases of torch that are supported
VERSIONED_NAMES = {
    "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_tensor", "all_gather_single",
    "reduce_scatter_single", "_allgather_base", "_reduce_scatter_base",
}  # fmt: skip


def path_of(name: str) -> Path:
    path = PACKAGE.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def tree(name: str) -> ast.Module:
    return ast.parse(path_of(name).read_text(), filename=name)


each_module = pytest.mark.parametrize("name", ORDER)


def test_every_module_has_its_place_in_the_map():
    assert sorted(PACKAGE.rglob("*.py")) == sorted(map(path_of, ORDER))


# ---- imports


def typing_only(module: ast.Module) -> set[ast.AST]:
    """Nodes under `if TYPE_CHECKING:`: annotations may name what stands above."""
    blocks = [
        node for node in module.body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]  # fmt: skip
    return {inner for block in blocks for inner in ast.walk(block)}


def imports_of(name: str) -> Iterator[tuple[int, str]]:
    """`(line, module of this package)` for every import, in functions too."""
    skipped = typing_only(tree(name))
    for node in ast.walk(tree(name)):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                assert alias.name.partition(".")[0] != "torch_gtp", f"{name}:{node.lineno}: import it relatively"
        elif isinstance(node, ast.ImportFrom) and node.level:
            inside = path_of(name).relative_to(PACKAGE).parent.parts
            package = inside[: len(inside) + 1 - node.level]
            modules = [node.module] if node.module is not None else [alias.name for alias in node.names]
            for module in modules:
                yield node.lineno, ".".join([*package, module])
        elif isinstance(node, ast.ImportFrom):
            root = (node.module or "").partition(".")[0]
            assert root != "torch_gtp", f"{name}:{node.lineno}: import it relatively"


@each_module
def test_imports_go_down_the_map_only(name):
    upward = [
        f"{name}:{line} imports {imported}"
        for line, imported in imports_of(name)
        if ORDER.index(imported) >= ORDER.index(name)
    ]
    assert upward == []


@pytest.mark.parametrize("name", sorted(ONLY_TORCH))
def test_what_stands_alone_imports_nothing_of_the_package(name):
    assert list(imports_of(name)) == []


@each_module
def test_torch_is_the_only_dependency(name):
    roots = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            roots.add((node.module or "").partition(".")[0])
    optional = {root for module, root in OPTIONAL if module == name}
    at_the_top = {ast.unparse(node) for node in tree(name).body if isinstance(node, ast.Import | ast.ImportFrom)}
    assert [line for line in at_the_top if any(root in line.split(".")[0] for root in optional)] == []
    assert {root for root in roots if root not in sys.stdlib_module_names} <= {"torch", *optional}


# ---- state


@each_module
def test_no_function_rebinds_a_global(name):
    assert [node.lineno for node in ast.walk(tree(name)) if isinstance(node, ast.Global)] == []


def is_mutable(value: ast.expr | None) -> bool:
    displays = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
    if isinstance(value, displays):
        return True
    if isinstance(value, ast.Call):
        function = value.func
        called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        return called in MUTABLE_TYPES
    return False


@each_module
def test_modules_and_classes_own_no_mutable_state(name):
    """Frozen tables (`frozenset`, `MappingProxyType`, tuples) are fine; so is `__all__`."""
    module = tree(name)
    bodies = [module.body] + [node.body for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
    offenders = []
    for statement in (statement for body in bodies for statement in body):
        if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
            continue
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = [ast.unparse(target) for target in targets]
        if names != ["__all__"] and is_mutable(statement.value):
            offenders.append(f"{name}:{statement.lineno} {names}")
    assert offenders == []


# ---- versions of torch


@each_module
def test_names_that_depend_on_the_version_of_torch_stay_in_one_module(name):
    if name == "_collectives":
        return
    offenders = []
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Attribute) and (
            node.attr in VERSIONED_NAMES or (node.attr == "__version__" and ast.unparse(node.value) == "torch")
        ):
            offenders.append(f"{name}:{node.lineno} {ast.unparse(node)}")
        if isinstance(node, ast.ExceptHandler) and "ImportError" in ast.unparse(node.type or ast.Name("")):
            offenders.append(f"{name}:{node.lineno} except ImportError")
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("hasattr", "getattr"):
            owner = ast.unparse(node.args[0])
            if owner.split(".")[0] in ("torch", "dist", "c10d", "nn"):
                offenders.append(f"{name}:{node.lineno} {ast.unparse(node)}")
    assert offenders == []


# ---- sizes


@each_module
def test_files_stay_short(name):
    assert len(path_of(name).read_text().splitlines()) <= MAX_FILE_LINES


@each_module
def test_functions_stay_short(name):
    offenders = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(tree(name))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert offenders == []


# ---- types and documentation


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").is_file()


@each_module
def test_every_function_has_type_hints(name):
    offenders = []
    for node in ast.walk(tree(name)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        arguments = node.args
        named = arguments.posonlyargs + arguments.args + arguments.kwonlyargs
        named += [extra for extra in (arguments.vararg, arguments.kwarg) if extra is not None]
        bare = [a.arg for a in named if a.annotation is None and a.arg not in ("self", "cls")]
        if bare or (node.returns is None and node.name != "__init__"):
            offenders.append(f"{name}:{node.lineno} {node.name} {bare}")
    assert offenders == []


@each_module
def test_every_module_has_a_docstring(name):
    assert ast.get_docstring(tree(name))


def public_objects() -> Iterator[tuple[str, object]]:
    """Everything a user may name: exports, public modules' own functions and classes, methods of those."""
    found = {f"torch_gtp.{name}": getattr(torch_gtp, name) for name in torch_gtp.__all__}
    for name in PUBLIC_MODULES:
        module = __import__(f"torch_gtp.{name}", fromlist=["_"])
        for attribute, value in vars(module).items():
            if getattr(value, "__module__", "").startswith(module.__name__) and not attribute.startswith("_"):
                found[f"torch_gtp.{name}.{attribute}"] = value
    for path, value in found.items():
        yield path, value
        if inspect.isclass(value):
            for attribute, member in vars(value).items():
                if not attribute.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
                    yield f"{path}.{attribute}", member


def test_everything_public_is_documented():
    undocumented = [path for path, value in public_objects() if not (inspect.getdoc(value) or "").strip()]
    assert undocumented == []


def test_exports_are_exactly_what_all_says():
    exported = {
        node.asname or node.name
        for statement in tree("__init__").body if isinstance(statement, ast.ImportFrom)
        for node in statement.names
    }  # fmt: skip
    assert sorted(torch_gtp.__all__) == sorted(exported)
    assert len(set(torch_gtp.__all__)) == len(torch_gtp.__all__)
