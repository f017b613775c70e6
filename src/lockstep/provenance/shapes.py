"""The shape of a JSON document that others may have edited or damaged.

A value and what it must look like in; what is wrong with it, in words, out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A shape is a type; or an object's entries by name, "?" at the end of those that may be absent; or {ANY: shape} for an
# object of any names.
ANY = "*"
_DEEPEST = 50  # lists and objects in each other; what is locked or recorded has 6
_WORDS = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}
_TEXTS = {ANY: str}

RECORD = {
    "stage": str,
    "key": str,
    "names": _TEXTS,
    "inputs": _TEXTS,
    "options": dict,
    "code": _TEXTS,
    "environment": _TEXTS,
    "outputs": _TEXTS,
    "backend?": {"name": str, "device": dict},
}
LOCK = {
    "model": str,
    "made with": {ANY: {"code": str, "packages": _TEXTS, "options?": dict, "backend?": dict, "operators?": _TEXTS}},
    "locked": {"checkpoint": {"source": str, ANY: str}, ANY: dict},
}


def misfit(value: Any, shape: Any, where: tuple[str, ...] = ()) -> str | None:
    """Return what is wrong with `value`, in words; None where nothing is.

    It names the first place that has not the `shape`, or says that the value is nested too deeply. Entries that the
    shape does not name may be anything, unless it has ANY.
    """
    if not where and _is_deeper(value, _DEEPEST):
        return f"the document: expected at most {_DEEPEST} lists and objects in each other, found more"
    if isinstance(shape, type):
        return None if isinstance(value, shape) else _expected(_WORDS[shape], value, where)
    if not isinstance(value, Mapping):
        return _expected(_WORDS[dict], value, where)
    named = {name.removesuffix("?"): inner for name, inner in shape.items() if name != ANY}
    for name in shape:
        if name != ANY and not name.endswith("?") and name not in value:
            return f"{' / '.join([*where, name])}: expected {_word(shape[name])}, found nothing"
    for name in sorted(value):
        inner = named.get(name, shape.get(ANY))
        if inner is not None and (wrong := misfit(value[name], inner, (*where, name))):
            return wrong
    return None


def _is_deeper(value: Any, levels: int) -> bool:
    """Return whether lists and objects are nested in more than `levels`.

    Without recursion, of which Python allows little more than JSON does.
    """
    inner = [value]
    for _ in range(levels):
        inner = [
            item
            for each in inner
            if isinstance(each, (dict, list))
            for item in (each.values() if isinstance(each, dict) else each)
        ]
    return any(isinstance(each, (dict, list)) for each in inner)


def _expected(word: str, value: Any, where: tuple[str, ...]) -> str:
    return f"{' / '.join(where) or 'the document'}: expected {word}, found {_WORDS.get(type(value), 'something else')}"


def _word(shape: Any) -> str:
    return _WORDS[shape if isinstance(shape, type) else dict]
