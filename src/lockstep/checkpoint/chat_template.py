"""Find the chat template of a checkpoint.

In: the checkpoint's folder. Out: the template, and the special tokens that it may name.

As transformers 5 finds them: `chat_template.jinja` before the `chat_template` of tokenizer_config.json, which is one
template or several with names: the one for tools and the default become one. Tokens stand in tokenizer_config.json and,
in older checkpoints, in special_tokens_map.json, each as a text or as an object with its `content`. Tokens that only a
tokenizer's class in transformers knows are not found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.artifacts.chat_template import LONGEST, LONGEST_TOKEN, ChatTemplate
from lockstep.checkpoint.source_files import cut, present, read_source_json, read_source_text, shorten
from lockstep.errors import InputError

_DEFAULT = "default"
_TOOLS = "tool_use"
_CONFIG = "tokenizer_config.json"
_JINJA = "chat_template.jinja"
_MAP = "special_tokens_map.json"
# What `read_chat_template` reads.
FILES = (_CONFIG, _JINJA, _MAP)


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """Read the chat template of a checkpoint; None where it has none, or several of which none is the default.

    Its syntax is not checked. Raises InputError for what is no template.
    """
    config = read_source_json(folder / _CONFIG) if present(folder / _CONFIG) else {}
    path = folder / _JINJA
    if present(path):
        template: str | None = read_source_text(path)
    else:
        path = folder / _CONFIG
        template = _chosen(_templates(config.get("chat_template"), path))
    if not template:
        return None
    _check(path, "chat_template", template, LONGEST)
    old = read_source_json(folder / _MAP) if "added_tokens_decoder" not in config and present(folder / _MAP) else {}
    tokens = {**dict(_tokens(config)), **dict(_tokens(old))}
    for name, token in tokens.items():
        _check(folder / _CONFIG, name, token, LONGEST_TOKEN)
    return ChatTemplate(template, tokens)


def _check(path: Path, name: str, text: str, longest: int) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = shorten(text[error.start : error.end])
        raise InputError(f"{path}: expected {name} in Unicode, found {found}; correct it") from None
    if len(text) > longest:
        raise InputError(f"{path}: expected {name} of at most {longest} characters, found {len(text)}; shorten it")


def without_default(folder: Path) -> str:
    """Say that a checkpoint has several chat templates and none that chats use; empty where that is not so."""
    if present(folder / _JINJA) or not present(folder / _CONFIG):
        return ""
    named = _templates(read_source_json(folder / _CONFIG).get("chat_template"), folder / _CONFIG)
    if not named or _DEFAULT in named:
        return ""
    return (
        f"chats will be refused, for of its chat templates ({cut(', '.join(sorted(named)))}) none is the default; put "
        f"one into {_JINJA} there"
    )


def _templates(found: Any, path: Path) -> dict[str, str]:
    """Return {name: template}. found: one template, or a list of {"name", "template"}."""
    if found is None or isinstance(found, str):
        return {_DEFAULT: found} if found else {}
    try:
        named = {entry["name"]: entry["template"] for entry in found}
        if all(isinstance(text, str) for text in (*named, *named.values())):
            return named
    except (TypeError, KeyError):
        pass
    raise InputError(
        f"{path}: expected chat_template to be a text, or a list of objects with name and template, found "
        f"{shorten(found)}; correct it, or put the template into {_JINJA} beside it"
    )


def _chosen(named: Mapping[str, str]) -> str | None:
    """Return the template that chats use, which takes the one for tools where a chat has some."""
    default = named.get(_DEFAULT)
    tools = named.get(_TOOLS)
    if not default or not tools:
        return default
    # Jinja drops the end of a line behind a tag and, but for the +, the white space before one.
    parts = "{% if tools %}", tools.removesuffix("\n"), "{%+ else %}", default.removesuffix("\n"), "{%+ endif %}"
    return "{}\n{}{}\n{}{}".format(*parts)


def _tokens(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    named = settings.get("extra_special_tokens")
    entries = {name: value for name, value in settings.items() if name.endswith("_token")}
    for name, value in {**entries, **(named if isinstance(named, dict) else {})}.items():
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str) and name.isidentifier():  # a template could name no other
            yield name, token
