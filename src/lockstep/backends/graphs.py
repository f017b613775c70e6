"""The graphs that engines are built from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.artifacts.assembly import Assembly, AttentionVariant, GraphFile
from lockstep.artifacts.files import sha256_file
from lockstep.errors import CheckError, InputError


@dataclass(frozen=True)
class HostGraph(GraphFile):
    """A graph that is copied, to run on the host: no engine is built from it, so none is compared with it."""


@dataclass(frozen=True)
class StateGraph(HostGraph):
    """The decode graph of a mixer with a state, `<mixer>.state`: the definition that its kernel is compared with."""


@dataclass(frozen=True)
class RopeGraph(HostGraph):
    """The decode graph of a variant, for its RoPE: `<variant>.rotary` is cut out of it (onnx_tools/rope.py)."""

    variant: AttentionVariant


@dataclass(frozen=True)
class BaseGraph(GraphFile):
    """The graph of a block without adapter inputs, `<class>.base`, for steps without adapters; block: the class."""

    block: str


@dataclass(frozen=True)
class RowsGraph(GraphFile):
    """The graph of a block whose adapters' first products become rows of weights (onnx_tools/adapted_graphs.py)."""


def with_rows(assembly: Assembly, name: str, graph: GraphFile) -> GraphFile:
    """Return a `RowsGraph` of a block that takes adapters; any other graph unchanged."""
    if assembly.adapters is None or name not in assembly.adapters.classes:
        return graph
    return RowsGraph(graph.file, graph.sha256, graph.signature)


def base_graphs(assembly: Assembly) -> Iterator[tuple[str, BaseGraph]]:
    """Yield (engine name, graph) of all blocks that take adapters."""
    if assembly.adapters is None:
        return
    for name in sorted(assembly.adapters.classes):
        graph = assembly.classes[name]
        yield base_engine(name), BaseGraph(graph.file, graph.sha256, graph.signature, name)


def base_engine(block: str) -> str:
    return f"{block}.base"


def graph_file(folder: Path, graph: GraphFile) -> Path:
    """Return the path of a graph. Raises InputError if it is absent, CheckError for another digest than recorded."""
    path = folder / graph.file
    if not path.is_file():
        raise InputError(f"{path}: expected a graph, found no file; export again")
    digest = sha256_file(path)
    if digest != graph.sha256:
        raise CheckError(f"{path}: expected sha256 {graph.sha256}, found {digest}; export again")
    return path
