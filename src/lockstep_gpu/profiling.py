"""NVTX ranges for Nsight: around steps, launches, and calls under the names that their times are reported under.

They are off, and cost nothing, unless the environment variable `LOCKSTEP_NVTX` is set when this module is imported.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

from lockstep.errors import InputError
from lockstep_gpu.attention.base import Calls

NVTX = "LOCKSTEP_NVTX"
_Function = TypeVar("_Function", bound=Callable[..., Any])

_nvtx: Any = None
if os.environ.get(NVTX):
    try:
        _nvtx = importlib.import_module("nvtx")
    except ImportError:
        raise InputError(f"{NVTX}: expected the package nvtx, found none; run pip install nvtx") from None


def in_range(name: str) -> Callable[[_Function], _Function]:
    """Return a decorator that runs a function in a range of this name; it returns the function if ranges are off."""

    def decorate(function: _Function) -> _Function:
        if _nvtx is None:
            return function

        @functools.wraps(function)
        def ranged(*arguments: Any, **options: Any) -> Any:
            with _nvtx.annotate(name):
                return function(*arguments, **options)

        return cast(_Function, ranged)

    return decorate


def in_ranges(calls: Calls) -> Calls:
    """Return calls that run in ranges of their names; the same list if ranges are off."""
    return calls if _nvtx is None else [(name, in_range(name)(call)) for name, call in calls]
