"""What the TensorRT backend asks of TensorRT's Python API is there in every version that it is for.

`tests/data/tensorrt_api.txt` lists the classes and members of real extension modules of these versions, and how many
arguments each takes; `tests/data/tensorrt_api.py` made it.
"""

from __future__ import annotations

import ast
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep_gpu.backends.tensorrt import compat

FOLDER = Path(compat.__file__).parent
LISTING = Path(__file__).parents[2] / "data" / "tensorrt_api.txt"
LINES = [line.split() for line in LISTING.read_text().splitlines()]
VERSIONS = [tuple(map(int, version.split(".")[:2])) for version in LINES[0][1:]]
IN_VERSIONS: dict[str, frozenset] = {}
COUNTS: dict[tuple, set[int]] = {}  # (name, version): the numbers of arguments that it takes
for marks, line in LINES[1:]:
    name, _, counts = line.rstrip(")").partition("(")
    versions = frozenset(version for version, mark in zip(VERSIONS, marks, strict=True) if mark == "x")
    IN_VERSIONS[name] = IN_VERSIONS.get(name, frozenset()) | versions
    if counts:
        COUNTS |= {(name, version): set(map(int, counts.split(","))) for version in versions}
MEMBERS = {name.partition(".")[2] for name in IN_VERSIONS if "." in name}


def guard_of(test: ast.expr) -> tuple[str, bool] | None:
    """(method, True) of `self.has_...()`; (method, False) of `not` that."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = guard_of(test.operand)
        return inner and (inner[0], not inner[1])
    is_has = isinstance(test, ast.Call) and ast.unparse(test.func).startswith("self.has_")
    return (ast.unparse(test.func).removeprefix("self."), True) if is_has else None


def versions_with(method: str) -> frozenset:
    assert method == "has_editable_cache"
    return frozenset(version for version in VERSIONS if version >= compat.EDITABLE_CACHE)


class Uses(ast.NodeVisitor):
    """Every `Class.member` of TensorRT that a module names, with the versions in which that line runs, and the number
    of arguments of each call; what cannot be told is in `unknown`."""

    def __init__(self) -> None:
        self.found: list[tuple[str, frozenset, int]] = []
        self.calls: list[tuple[str, frozenset, int, int | None]] = []
        self.unknown: list[tuple[str, int]] = []
        self.types: dict[str, str] = {}
        self.versions = frozenset(VERSIONS)

    def under(self, test: ast.expr, holds: bool, nodes: list) -> None:
        guard = guard_of(test)
        before = self.versions
        if guard and (holds or not isinstance(test, ast.BoolOp)):
            inside = versions_with(guard[0])
            self.versions = before & (inside if guard[1] == holds else frozenset(VERSIONS) - inside)
        for node in nodes:
            self.visit(node)
        self.versions = before

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self.under(node.test, True, node.body)
        self.under(node.test, False, node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self.under(node.test, True, [node.body])
        self.under(node.test, False, [node.orelse])

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer_types = dict(self.types)
        versions = self.versions
        for argument in node.args.args:
            self.declare(argument.arg, argument.annotation)
        for statement in node.body:
            self.visit(statement)
            leaves = isinstance(statement, ast.If) and isinstance(statement.body[-1], (ast.Return, ast.Raise))
            guard = guard_of(statement.test) if leaves else None
            if guard:  # the rest of the function runs where the test does not hold
                inside = versions_with(guard[0])
                self.versions &= frozenset(VERSIONS) - inside if guard[1] else inside
        self.types = outer_types
        self.versions = versions

    def declare(self, name: str, annotation: ast.expr | None) -> None:
        text = ast.unparse(annotation).removesuffix(" | None") if annotation else ""
        self.types[name] = text

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.declare(node.target.id, node.annotation)
        if node.value:
            self.visit(node.value)

    def member(self, node: ast.expr) -> str | None:
        """`Class` or `Class.member` of TensorRT; None for all else."""
        text = ast.unparse(node)
        root = text.partition(".")[0]
        if text.startswith("self.api.") or root == "trt":
            return text.removeprefix("self.api.").removeprefix("trt.")
        if isinstance(node, ast.Attribute) and text.count(".") == 1 and self.types.get(root, "").startswith("trt."):
            return f"{self.types[root].removeprefix('trt.')}.{node.attr}"
        return None

    def visit_Call(self, node: ast.Call) -> None:
        if (name := self.member(node.func)) and "__" not in name:
            plain = not node.keywords and not any(isinstance(argument, ast.Starred) for argument in node.args)
            self.calls.append((name, self.versions, node.lineno, len(node.args) if plain else None))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        text = ast.unparse(node)
        root = text.partition(".")[0]
        if (name := self.member(node)) is not None:
            if "__" not in name:
                self.found.append((name, self.versions, node.lineno))
            if "." in name and root in ("self", "trt"):
                return
        elif node.attr in MEMBERS and not (root in ("self", "log", "error", "re", "np") or self.types.get(root)):
            self.unknown.append((text, node.lineno))
        self.generic_visit(node)


def uses_of(source: str) -> Uses:
    uses = Uses()
    uses.visit(ast.parse(source))
    return uses


def missing(uses: Uses) -> list[str]:
    lines = [
        f"line {line}: {name} is not in {sorted(versions - IN_VERSIONS.get(name, frozenset()))}"
        for name, versions, line in uses.found
        if versions - IN_VERSIONS.get(name, frozenset())
    ]
    for name, versions, line, count in uses.calls:
        unsupported = [version for version in sorted(versions) if count not in COUNTS.get((name, version), ())]
        if unsupported:
            lines.append(f"line {line}: {name} does not take {count} arguments in {unsupported}")
    return lines


def test_every_attribute_and_call_is_in_every_version_in_which_its_line_runs():
    uses = uses_of((FOLDER / "compat.py").read_text())
    assert len(uses.found) > 60 and len(uses.calls) > 30 and not missing(uses)
    assert not uses.unknown, "annotate the object with its TensorRT class, so that its members can be looked up"


def test_the_listing_is_that_of_the_real_modules():
    api = runpy.run_path(str(LISTING.with_suffix(".py")))
    folder = os.environ.get(api["WHEELS"])
    if not folder:
        pytest.skip(f"{api['WHEELS']} names no folder that tests/data/tensorrt_api.py has filled")
    assert api["listing"](Path(folder).glob("*.whl")) == LISTING.read_text()


def test_the_module_for_annotations_is_used_in_annotations_only():
    """`trt` is imported for type checkers: at run time there is `self.api`."""
    tree = ast.parse((FOLDER / "compat.py").read_text())
    allowed: set[ast.AST] = set()
    for node in ast.walk(tree):
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if annotation is not None:
                allowed.update(ast.walk(annotation))
        # `trt: Any = self.api`, in the function that makes a class of the library's
        if isinstance(node, ast.FunctionDef) and node.name == "logger":
            allowed.update(ast.walk(node))
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "trt"]
    assert not [name.lineno for name in names if name not in allowed]


@pytest.mark.parametrize(("source", "problem"), [
    ("config.set_flag(self.api.BuilderFlag.FP16)", "line 1: BuilderFlag.FP16 is not in [(11, 0), (11, 2), (11, 4)]"),
    ("def f(engine: trt.ICudaEngine):\n    engine.device_memory_size",
        "line 2: ICudaEngine.device_memory_size is not in [(11, 0), (11, 2), (11, 4)]"),
    ("def f(cache: trt.ITimingCache):\n    return 1 if self.has_editable_cache() else cache.query",
        "line 2: ITimingCache.query is not in [(10, 6), (10, 7)]"),
    ("trt.Builder.biuld", "line 1: Builder.biuld is not in"),
    ("def f(config: trt.IBuilderConfig):\n    config.set_flag()", "line 2: IBuilderConfig.set_flag does not take 0"),
    ("self.api.OnnxParser(network, logger=logger)", "line 1: OnnxParser does not take None arguments in [(10, 6)"),
])  # fmt: skip
def test_what_a_version_lacks_is_found(source, problem):
    assert [line for line in missing(uses_of(source)) if line.startswith(problem)]


def test_a_use_under_its_feature_is_right_and_an_object_without_a_class_is_found():
    source = "def f(cache: trt.ITimingCache):\n    if not self.has_editable_cache():\n        return\n    cache.query"
    assert not missing(uses_of(source)) and uses_of("thing.num_layers").unknown == [("thing.num_layers", 1)]


@pytest.mark.parametrize(
    "path", sorted(path for path in FOLDER.glob("*.py") if path.name != "compat.py"), ids=lambda path: path.name
)
def test_no_other_module_calls_a_method_of_tensorrt(path):
    """The methods of these classes whose names none of our methods has."""
    classes = (
        "Builder", "IBuilderConfig", "INetworkDefinition", "ICudaEngine", "IExecutionContext", "ITimingCache",
        "Runtime", "OnnxParser",
    )  # fmt: skip
    pairs = [name.partition(".")[::2] for name in IN_VERSIONS]
    methods = {method for owner, method in pairs if owner in classes and "_" in method}
    ours = ("TENSORRT", "library", "self.library", "self", "onnx.shape_inference")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods:
            assert ast.unparse(node.func.value) in ours, ast.unparse(node)


def test_graphs_have_what_they_need_in_every_version():
    """Types that the graph states, int4 and int8 weights as inputs, DequantizeLinear."""
    for name in (
        "DataType.BF16",
        "DataType.INT4",
        "DataType.INT8",
        "INetworkDefinition.add_dequantize",
        "LayerType.DEQUANTIZE",
        "NetworkDefinitionCreationFlag.STRONGLY_TYPED",
    ):
        assert IN_VERSIONS[name] == frozenset(VERSIONS), name


def test_without_tensorrt_the_backend_says_so_in_one_line():
    code = (
        "import sys; sys.modules['tensorrt'] = None\nfrom lockstep.backends.base import get_backend\nfrom "
        "lockstep.errors import guard\nwith guard(): get_backend('tensorrt')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr == (
        "lockstep: error: backend tensorrt: the Python package tensorrt is not installed "
        "for this Python; pip install tensorrt-cu12, or see docs/tensorrt.md\n"
    )
