"""The tokens at which an answer ends.

In: a checkpoint's folder, its config and the id of its tokenizer's `eos_token`. Out: token ids, each with the places
that name it. They differ for many chat models, whose base ends at another token than a turn: all of them end an answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.checkpoint.source_files import present, read_source_json, shorten
from lockstep.config import model_config
from lockstep.errors import InputError

_KEY = "eos_token_id"


def stop_ids(folder: Path, config: Mapping[str, Any], tokenizer_eos: int | None) -> dict[int, tuple[str, ...]]:
    """Return {token id: where it is named}, sorted.

    Where are generation_config.json, config.json and the tokenizer. An id beyond the vocabulary, which no answer can
    have, is left out. Raises InputError for what is no token id.
    """
    named: dict[int, list[str]] = defaultdict(list)
    for name, settings in _settings(folder, config):
        for token in ids_of(settings.get(_KEY), folder / name):
            named[token].append(name)
    if tokenizer_eos is not None:
        named[tokenizer_eos].append("the tokenizer")
    vocabulary = model_config.setting(config, ("vocab_size",))
    return {token: tuple(named[token]) for token in sorted(named) if type(vocabulary) is not int or token < vocabulary}


def described(found: Mapping[int, tuple[str, ...]]) -> str:
    """Return where each of `stop_ids` was found, in a line; "" where all places name the same."""
    places = {place for where in found.values() for place in where}
    if all(set(where) == places for where in found.values()):
        return ""
    listed = "; ".join(f"{token} ({', '.join(where)})" for token, where in found.items())
    return f"an answer ends at any of these tokens: {listed}"


def _settings(folder: Path, config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    generation = folder / "generation_config.json"
    found = [("config.json", config)]
    return [(generation.name, read_source_json(generation)), *found] if present(generation) else found


def ids_of(value: Any, path: Path) -> list[int]:
    """Return the ids of an `eos_token_id` of the file `path`, sorted: one id, several or none."""
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(type(number) is int and number >= 0 for number in ids):
        raise InputError(
            f"{path}: expected eos_token_id to be a token id or a list of them, found {shorten(value)}; correct it"
        )
    return sorted(set(ids))
