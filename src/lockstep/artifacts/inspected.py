"""The comparable properties of an engine set, as JSON.

One of two sets may be looked at in another Python than the one that compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.artifacts.document import JsonObject


@dataclass(frozen=True)
class InspectedEngine:
    """The comparable properties of an engine.

    choices, layers: as its backend gives them, JSON. sha256: of the bytes that equal builds share. left_out: the other
    bytes, in words.
    """

    choices: Any
    layers: Any
    sha256: str
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class InspectedSet(JsonObject):
    """All engines of a set by name.

    digest: of the set. device: what of it matters, JSON.
    """

    digest: str
    device: Any
    engines: Mapping[str, InspectedEngine]
