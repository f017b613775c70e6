"""Triton's model configuration as text: config.pbtxt, protobuf's text format of a ModelConfig, read and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import text_format

from lockstep.errors import InputError
from lockstep_serve.triton.grpc_messages import MESSAGES


def read_config(path: Path) -> Any:
    """Return the ModelConfig of a file, without unknown fields. Raises InputError."""
    try:
        text = path.read_text(encoding="utf-8")
        if "${" in text:
            line = text.count("\n", 0, text.index("${")) + 1
            raise InputError(f"{path}, line {line}: expected a value, found a '${{' that was not filled in; fill it in")
        return text_format.Parse(text, MESSAGES["ModelConfig"](), allow_unknown_field=True)
    except text_format.ParseError as error:
        where = str(path)
        if error.GetLine():  # an unknown field has none
            where = f"{path}, line {error.GetLine()}"
        fault = (str(error).partition(" : ")[2] or str(error)).rstrip(".")
        raise InputError(f"{where}: expected protobuf's text format, found {fault}; correct it") from None
    except RecursionError:
        raise InputError(f"{path}: expected a model's configuration, found too many braces; correct it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected a model's configuration, found none that can be read: {error}") from None


def parameters_of(config: Any) -> dict[str, str]:
    """Return the parameters of a ModelConfig that have a value, which "" and "none" are not."""
    values = {name: value.string_value for name, value in config.parameters.items()}
    return {name: value for name, value in values.items() if value not in ("", "none")}


def text_of(message: Any, in_one_line: bool = False) -> str:
    """Return the text of a message; maps are in the order of their keys, so the same message is the same text."""
    text: str = text_format.MessageToString(
        message, as_utf8=True, use_short_repeated_primitives=True, as_one_line=in_one_line
    )
    return text
