"""The graphs that engines are built from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.artifacts.files import sha256_file
from lockstep.errors import CheckError, InputError


def graphs_of(assembly: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(engine name, graph entry) of all that an assembly needs: classes by name, kinds as `<kind>.prefill` and
    `<kind>.decode`.

    A backend that has attention of its own (`Backend.graphs`) may take `<kind>.rotary` instead: the decode graph's
    entry with the kind's as "rotary_of". That engine is a graph too, cut out of the decode graph (rotary.py): engines
    run where the assembly's graphs are not.
    """
    for name in sorted(assembly["classes"]):
        yield name, assembly["classes"][name]
    for name in sorted(assembly["kinds"]):
        for phase in ("decode", "prefill"):
            yield f"{name}.{phase}", assembly["kinds"][name][phase]


def graph_file(folder: Path, graph: Mapping[str, Any]) -> Path:
    """The file of a graph entry in the assembly's folder. Raises InputError where it is absent, CheckError where it is
    not the recorded one."""
    path = folder / graph["graph"]
    if not path.is_file():
        raise InputError(f"{path}: expected a graph, found no file; export again")
    if (found := sha256_file(path)) != graph["sha256"]:
        raise CheckError(f"{path}: expected sha256 {graph['sha256']}, found {found}; export again")
    return path
