"""Structured output: a grammar in, which tokens may come next out. llguidance is loaded when one is first asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["json_schema", "json_object", "regex", "lark"]


@dataclass(frozen=True)
class Grammar:
    """What an answer must be. text: a JSON schema, a regular expression that the whole answer matches, or a grammar in
    llguidance's dialect of Lark; "json_object" has none. name: of the field that asked for it, for errors."""

    kind: Kind
    text: str = ""
    name: str = field(default="grammar", compare=False)
