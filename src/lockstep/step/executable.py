"""An engine bound to its weights, as a step calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

Run = Callable[[], None]


class Executable(Protocol):
    """An engine with its weights."""

    def prepare(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Run:
        """A call that reads `inputs` and writes `outputs` in place, as often as it is called.

        Arrays must be contiguous and of the engine's dtypes; they are kept alive by the call. Raises CheckError
        otherwise.
        """
        ...
