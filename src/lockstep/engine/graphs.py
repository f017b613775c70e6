"""The graphs that engines are built from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def graphs_of(assembly: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(engine name, graph entry) of all that an assembly needs: classes by name, kinds as `<kind>.prefill` and `<kind>.decode`.

    A backend that has attention of its own (`Backend.graphs`) may take `<kind>.rotary` instead: the decode graph's entry with the kind's as "rotary_of".
    """
    for name in sorted(assembly["classes"]):
        yield name, assembly["classes"][name]
    for name in sorted(assembly["kinds"]):
        for phase in ("decode", "prefill"):
            yield f"{name}.{phase}", assembly["kinds"][name][phase]
