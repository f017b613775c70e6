"""Formats of tool calls: each a small file; an answer's text in, calls out."""

from __future__ import annotations

from lockstep_serve.reasoning import named_format
from lockstep_serve.tool_formats.base import ToolFormat
from lockstep_serve.tool_formats.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from lockstep_serve.tool_formats.granite import GRANITE
from lockstep_serve.tool_formats.harmony import HARMONY
from lockstep_serve.tool_formats.hermes import HERMES
from lockstep_serve.tool_formats.kimi import KIMI
from lockstep_serve.tool_formats.mistral import MISTRAL, MISTRAL_ARGS
from lockstep_serve.tool_formats.plain_json import JSON, LLAMA3
from lockstep_serve.tool_formats.pythonic import PYTHONIC
from lockstep_serve.tool_formats.tagged import GLM, QWEN3_CODER, SEED

# In the order in which they are tried on a template: more specific ones first.
_OF_MARKS = (MISTRAL_ARGS, MISTRAL, DEEPSEEK_V3, DEEPSEEK_V31, KIMI, HARMONY, GLM, SEED, QWEN3_CODER, GRANITE, HERMES)
_ALL = (*_OF_MARKS, PYTHONIC, LLAMA3, JSON)
FORMATS = {format.name: format for format in _ALL}


def tool_format(named: str | None, template: str | None) -> ToolFormat | None:
    """Return the named format, else the one that a chat template uses; None for neither, and for "none".

    Raises InputError for an unknown name.
    """
    if named is not None:
        return named_format("--tool-call-parser", named, FORMATS)
    for format in _ALL:
        if format.template and all(text in (template or "") for text in format.template):
            return format
    return None
