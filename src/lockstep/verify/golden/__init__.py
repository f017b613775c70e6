"""Golden: references of Hugging Face transformers, and engine sets against them.

Its functions are loaded when they are asked for, and by name: references need torch, the check must not load it, and a
stage is rerun for a change of its own code only.
"""

import importlib
from typing import Any

_MODULES = {
    "GoldenTerms": "terms",
    "check_engines": "check",
    "make_quantized_reference": "quantized",
    "make_reference": "reference",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = function
    return function
