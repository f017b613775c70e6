"""Structured output: a grammar in, the tokens that may come next out.

llguidance is loaded when a grammar is first asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["json_schema", "json_object", "regex", "lark"]


@dataclass(frozen=True)
class Grammar:
    """The form that an answer must have.

    text: a JSON schema, a regular expression that the whole answer matches, or a grammar in llguidance's dialect of
    Lark; "json_object" has none. name: of the field that asked for it, for errors. around: a grammar in that dialect,
    in which the answer's form stands as `@answer`; "": the form is all of the answer.
    """

    kind: Kind
    text: str = ""
    name: str = field(default="grammar", compare=False)
    around: str = ""
