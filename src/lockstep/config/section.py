"""The base class of the config's sections, and types with their bounds.

Below the rest of `config`, so that a backend's settings can be made of them (`lockstep.config.backends`).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

INT32_MAX = 2**31 - 1  # dimensions and lengths are int32 in engines


def _as_tuple(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return value


def path_text(value: Any) -> Any:
    """Refuse the one character that no path has."""
    if isinstance(value, str) and "\0" in value:
        raise PydanticCustomError("path", "a path without the character U+0000")
    return value


def _flag(value: Any) -> Any:
    """Turn the text "true" or "false" of Snakemake's command line into a bool."""
    if not isinstance(value, str):
        return value
    return {"true": True, "false": False}.get(value.lower(), value)


Flag = Annotated[bool, BeforeValidator(_flag)]
Count = Annotated[int, Field(ge=1, le=INT32_MAX)]
PathText = Annotated[str, BeforeValidator(path_text)]
AsTuple = BeforeValidator(_as_tuple)
UNIQUE: JsonDict = {"uniqueItems": True}


class Section(BaseModel):
    """A mapping of the config, frozen, without unknown keys or conversion of types."""

    # strict: otherwise pydantic accepts "4" and 4.0 as integers, and 1 as true.
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
