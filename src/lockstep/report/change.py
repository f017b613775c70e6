"""One difference between a result and the lock of its model, as the report tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.targets import Target


@dataclass(frozen=True)
class Change:
    """What differs from a lock. line: where a result is, and "locked -> found". names: which precision, layers and
    backend the result is of; without those that it is not made for."""

    line: str
    names: Mapping[str, Any] = field(default_factory=dict)

    def is_of(self, target: Target) -> bool:
        """Whether the result is this target's, or one that it shares with others of its model."""
        own = {"precision": target.precision, "layers": target.layers, "backend": target.backend}
        return all(str(self.names.get(name, value)) == str(value) for name, value in own.items())
