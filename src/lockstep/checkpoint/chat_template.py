"""Find the chat template of a checkpoint.

In: the checkpoint's folder. Out: the template, and the special tokens that it may name.

Lookup as in transformers 5: `chat_template.jinja` before the `chat_template` of tokenizer_config.json, which is one
template or several with names, of which the default and the one for tools are joined. Tokens are in
tokenizer_config.json and, in older checkpoints, in special_tokens_map.json, each as a text or as an object with its
`content`. Tokens that only a tokenizer's class in transformers names are not found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.artifacts.chat_template import LONGEST, LONGEST_TOKEN, ChatTemplate
from lockstep.checkpoint.source_files import present, read_source_json, read_source_text, shorten
from lockstep.errors import InputError, truncate

_DEFAULT = "default"
_TOOLS = "tool_use"
_CONFIG = "tokenizer_config.json"
_JINJA = "chat_template.jinja"
_MAP = "special_tokens_map.json"
FILES = (_CONFIG, _JINJA, _MAP)  # that `read_chat_template` reads


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """Read the chat template of a checkpoint; None if it has none, or several without a default.

    Its syntax is not checked. Raises InputError for a value that is not a template.
    """
    config = read_source_json(folder / _CONFIG) if present(folder / _CONFIG) else {}
    path = folder / _JINJA
    if present(path):
        template: str | None = read_source_text(path)
    else:
        path = folder / _CONFIG
        template = _default_template(_templates(config.get("chat_template"), path))
    if not template:
        return None
    _check(path, "chat_template", template, LONGEST)
    tokens = dict(_tokens(config))
    if "added_tokens_decoder" not in config and present(folder / _MAP):  # an older checkpoint
        tokens |= _tokens(read_source_json(folder / _MAP))
    for name, token in tokens.items():
        _check(folder / _CONFIG, name, token, LONGEST_TOKEN)
    return ChatTemplate(template, tokens)


def _check(path: Path, name: str, text: str, max_length: int) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        actual = shorten(text[error.start : error.end])
        raise InputError(f"{path}: expected {name} in Unicode, found {actual}; correct it") from None
    if len(text) > max_length:
        raise InputError(f"{path}: expected {name} of at most {max_length} characters, found {len(text)}; shorten it")


def without_default(folder: Path) -> str:
    """Return a message for a checkpoint with several chat templates and no default; "" for others."""
    if present(folder / _JINJA) or not present(folder / _CONFIG):
        return ""
    templates = _templates(read_source_json(folder / _CONFIG).get("chat_template"), folder / _CONFIG)
    if not templates or _DEFAULT in templates:
        return ""
    names = truncate(", ".join(sorted(templates)))
    return (
        f"chats will be refused, for of its chat templates ({names}) none is the default; put one into {_JINJA} there"
    )


def _templates(value: Any, path: Path) -> dict[str, str]:
    """Return {name: template}. value: one template, or a list of {"name", "template"}."""
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        return {_DEFAULT: value}
    try:
        templates = {entry["name"]: entry["template"] for entry in value}
        if all(isinstance(text, str) for text in (*templates, *templates.values())):
            return templates
    except (TypeError, KeyError):
        pass
    raise InputError(
        f"{path}: expected chat_template to be a text, or a list of objects with name and template, found "
        f"{shorten(value)}; correct it, or put the template into {_JINJA} next to it"
    )


def _default_template(templates: Mapping[str, str]) -> str | None:
    """Return the template for chats, which uses the one for tools if a chat has tools."""
    default = templates.get(_DEFAULT)
    tools = templates.get(_TOOLS)
    if not default or not tools:
        return default
    tools = tools.removesuffix("\n")
    default = default.removesuffix("\n")
    # Jinja drops the newline after a tag and, but for the +, the white space before one.
    return f"{{% if tools %}}\n{tools}{{%+ else %}}\n{default}{{%+ endif %}}"


def _tokens(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    tokens = {name: value for name, value in settings.items() if name.endswith("_token")}
    extra_tokens = settings.get("extra_special_tokens")
    if isinstance(extra_tokens, dict):
        tokens |= extra_tokens
    for name, value in tokens.items():
        token = value
        if isinstance(value, dict):
            token = value.get("content")
        if isinstance(token, str) and name.isidentifier():  # a template could name no other
            yield name, token
