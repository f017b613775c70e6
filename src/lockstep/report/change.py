"""One difference between a result and the lock of its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.targets import Target


@dataclass(frozen=True)
class Change:
    """One difference from a lock.

    line: where a result is, and "locked -> found". names: the precision, layers and backend of the result, without
    those that it has none of.
    """

    line: str
    names: Mapping[str, Any] = field(default_factory=dict)

    def is_of(self, target: Target) -> bool:
        """Return whether the result is this target's, alone or shared.

        It may be shared with other targets of its model.
        """
        own = {"precision": target.precision, "layers": target.layers, "backend": target.backend}
        return all(str(self.names.get(name, value)) == str(value) for name, value in own.items())
