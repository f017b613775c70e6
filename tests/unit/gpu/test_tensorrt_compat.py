"""What the TensorRT backend asks of TensorRT's Python API is there in every version that it is for.

`tests/data/tensorrt_api.txt` lists the classes and members of real extension modules of these versions, and how many
arguments each takes; `tests/data/tensorrt_api.py` made it.
"""

from __future__ import annotations

import ast
import itertools
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep_gpu.backends.tensorrt import compat

FOLDER = Path(compat.__file__).parent
LISTING = Path(__file__).parents[2] / "data" / "tensorrt_api.txt"
LINES = [line.split() for line in LISTING.read_text().splitlines()]
VERSIONS = [tuple(map(int, version.split(".")[:2])) for version in LINES[0][1:]]
IN_VERSIONS: dict[str, frozenset] = {}
COUNTS: dict[tuple, set[int]] = {}  # (name, version): the numbers of arguments that it takes
ALL_MEMBERS = {line[1]: line[2:] for line in LINES if line[0] == "members"}
for marks, line in [line for line in LINES[1:] if line[0] != "members"]:
    name, _, counts = line.rstrip(")").partition("(")
    versions = frozenset(version for version, mark in zip(VERSIONS, marks, strict=True) if mark == "x")
    IN_VERSIONS[name] = IN_VERSIONS.get(name, frozenset()) | versions
    if counts:
        COUNTS |= {(name, version): set(map(int, counts.split(","))) for version in versions}
MEMBERS = set(itertools.chain.from_iterable(ALL_MEMBERS.values()))


# What only versions with editable timing caches have, and only `has_editable_cache` reaches.
OF_EDITABLE_CACHES = {
    "BuilderFlag.EDITABLE_TIMING_CACHE", "ITimingCache.query", "ITimingCache.queryKeys", "TimingCacheValue.tacticHash",
}  # fmt: skip


class Uses(ast.NodeVisitor):
    """Every `Class.member` of TensorRT that a module names, and the number of arguments of each call; what cannot be
    told is in `unknown`."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []
        self.calls: list[tuple[str, int, int | None]] = []
        self.unknown: list[tuple[str, int]] = []
        self.types: dict[str, str] = {}

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer_types = dict(self.types)
        for argument in node.args.args:
            self.declare(argument.arg, argument.annotation)
        self.generic_visit(node)
        self.types = outer_types

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
            self.calls.append((name, node.lineno, len(node.args) if plain else None))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        text = ast.unparse(node)
        root = text.partition(".")[0]
        if (name := self.member(node)) is not None:
            if "__" not in name:
                self.found.append((name, node.lineno))
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
    lines = []
    for name, line in uses.found:
        if lacking := sorted(versions_of(name).difference(IN_VERSIONS.get(name, ()))):
            lines.append(f"line {line}: {name} is not in {lacking}")
    for name, line, count in uses.calls:
        lacking = [version for version in sorted(versions_of(name)) if count not in COUNTS.get((name, version), ())]
        if lacking:
            lines.append(f"line {line}: {name} does not take {count} arguments in {lacking}")
    return lines


def versions_of(name: str) -> set[tuple[int, ...]]:
    """Return the versions in which lines with this name run."""
    return {version for version in VERSIONS if name not in OF_EDITABLE_CACHES or version >= compat.EDITABLE_CACHE}


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
    ("trt.Builder.biuld", "line 1: Builder.biuld is not in"),
    ("def f(config: trt.IBuilderConfig):\n    config.set_flag()", "line 2: IBuilderConfig.set_flag does not take 0"),
    ("self.api.OnnxParser(network, logger=logger)", "line 1: OnnxParser does not take None arguments in [(10, 3)"),
])  # fmt: skip
def test_what_a_version_lacks_is_found(source, problem):
    assert [line for line in missing(uses_of(source)) if line.startswith(problem)]


def test_an_object_without_a_class_is_found():
    assert uses_of("thing.num_layers").unknown == [("thing.num_layers", 1)]


def test_entries_of_a_timing_cache_are_asked_for_where_they_can_be_read():
    for version, flags in (("10.7.0", ["miss"]), ("10.8.0", ["editable", "miss"])):
        library = compat.Library()
        flag = SimpleNamespace(EDITABLE_TIMING_CACHE="editable", ERROR_ON_TIMING_CACHE_MISS="miss")
        library.api = SimpleNamespace(__version__=version, BuilderFlag=flag)
        cache = SimpleNamespace(queryKeys=lambda: ["key"], query=lambda key: SimpleNamespace(tacticHash=18))
        found = []
        config = SimpleNamespace(
            set_flag=found.append, get_timing_cache=lambda cache=cache: cache, set_timing_cache=lambda *_: True
        )
        assert library.use_timing_cache(config, cache, True) and found == flags
        expected = {"key": "0x0000000000000012"} if "editable" in flags else {}
        assert library.cached_tactics(config) == expected


@pytest.mark.parametrize(
    "path", sorted(path for path in FOLDER.glob("*.py") if path.name != "compat.py"), ids=lambda path: path.name
)
def test_no_other_module_calls_a_method_of_tensorrt(path):
    """The methods of these classes whose names none of our methods has."""
    classes = (
        "Builder", "IBuilderConfig", "INetworkDefinition", "ICudaEngine", "IExecutionContext", "ITimingCache",
        "Runtime", "OnnxParser",
    )  # fmt: skip
    methods = {method for owner in classes for method in ALL_MEMBERS[owner] if "_" in method}
    ours = ("TENSORRT", "library", "self.library", "self", "onnx.shape_inference")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods:
            assert ast.unparse(node.func.value) in ours, ast.unparse(node)


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
