"""Rename the tensors of a wrapped language model as in the language model alone.

In: names of a checkpoint's tensors. Out: the language model's, renamed, and those of the towers for images or sound.

Models of text and images have a causal LM next to their towers, under prefixes that changed over the years. With the
names of a checkpoint of the language model alone, callers need not know about wrappers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

# The prefixes of published checkpoints, and of what current transformers saves; the longer one first.
PREFIXES = {
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
}
# Towers of wrappers whose language model has no prefix (Qwen2-VL).
_BARE_TOWERS = re.compile(r"visual\.")
_HEAD = "lm_head."
_T = TypeVar("_T")


def language_name(name: str) -> str:
    """Return the name of a wrapped language model's tensor, parameter or module in the model alone."""
    for prefix, replacement in PREFIXES.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


def language_tensors(tensors: Mapping[str, _T]) -> tuple[dict[str, _T], tuple[str, ...]]:
    """Return the tensors of the language model by their names in the model alone, and the names of the rest, sorted."""
    renamed = {name: language_name(name) for name in tensors}
    is_wrapped = any(name != new for name, new in renamed.items())

    def is_of_tower(name: str) -> bool:
        if is_wrapped:  # all of the language model has a prefix, but for the head of some
            return renamed[name] == name and not name.startswith(_HEAD)
        return _BARE_TOWERS.match(name) is not None

    tower_tensors = tuple(sorted(name for name in tensors if is_of_tower(name)))
    return {renamed[name]: tensor for name, tensor in tensors.items() if not is_of_tower(name)}, tower_tensors


def towers(names: tuple[str, ...]) -> str:
    """Return the modules of tower tensors, for a message: "vision_tower, multi_modal_projector"."""
    parts = [name.removeprefix("model.").partition(".")[0] for name in names]
    return ", ".join(dict.fromkeys(parts))
