"""Parameters of which `make test` runs some: those named, or the first. The others are long."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def some(values: Iterable[Any], *always: Any) -> list[Any]:
    """Return values as parameters; a tuple is several."""
    values = list(values)
    return [_parameter(value, value in (always or values[:1])) for value in values]


def some_cases(cases: Mapping[str, Any], *always: str) -> list[Any]:
    """Return the values of cases as parameters, with their names, which `always` names too."""
    often = always or tuple(cases)[:1]
    return [_parameter(case, name in often, id=name) for name, case in cases.items()]


def _parameter(value: Any, often: bool, **named: str) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=[] if often else pytest.mark.long, **named)
