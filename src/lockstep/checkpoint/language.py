"""The tensors of a wrapped language model, under the names of the language model alone.

In: names of a checkpoint's tensors. Out: the language model's, renamed, and those of the towers for images or sound.

Models of text and images keep a causal LM beside their towers, under prefixes that changed with the years. What works
on the language model needs no word of it: its tensors have the names here that a checkpoint of it alone has.
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
# Towers beside a language model whose tensors have no prefix (Qwen2-VL).
_BARE_TOWERS = re.compile(r"visual\.")
_HEAD = "lm_head."
_T = TypeVar("_T")


def language_name(name: str) -> str:
    """Return the name that a tensor, parameter or module of a wrapped language model has in the model alone."""
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
    return name if prefix is None else PREFIXES[prefix] + name.removeprefix(prefix)


def language_tensors(tensors: Mapping[str, _T]) -> tuple[dict[str, _T], tuple[str, ...]]:
    """Return the tensors of the language model by the names of the model alone, and the names of all others, sorted."""
    renamed = {name: language_name(name) for name in tensors}
    is_wrapped = any(name != new for name, new in renamed.items())

    def is_other(name: str) -> bool:
        if is_wrapped:
            return renamed[name] == name and not name.startswith(_HEAD)
        return _BARE_TOWERS.match(name) is not None

    others = tuple(sorted(name for name in tensors if is_other(name)))
    return {renamed[name]: tensor for name, tensor in tensors.items() if not is_other(name)}, others


def towers(others: tuple[str, ...]) -> str:
    """Return the modules that hold other tensors, for a line: "vision_tower, multi_modal_projector"."""
    parts = [name.removeprefix("model.").partition(".")[0] for name in others]
    return ", ".join(dict.fromkeys(parts))
