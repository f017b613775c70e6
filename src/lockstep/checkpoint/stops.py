"""The tokens at which an answer ends.

In: a checkpoint's folder, its config and the id of its tokenizer's `eos_token`. Out: token ids, each with the files
that name it. Many chat models have several, since the base model ends at another token than a turn: all end an answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.checkpoint.source_files import present, read_source_json, shorten
from lockstep.config import model_config
from lockstep.errors import InputError


def stop_ids(folder: Path, config: Mapping[str, Any], tokenizer_eos: int | None) -> dict[int, tuple[str, ...]]:
    """Return {token id: the files that name it}, sorted; the tokenizer counts as one.

    An id beyond the vocabulary, which no answer can contain, is left out. Raises InputError for values that are not
    token ids.
    """
    generation = folder / "generation_config.json"
    settings_of_files: dict[str, Mapping[str, Any]] = {}
    if present(generation):
        settings_of_files[generation.name] = read_source_json(generation)
    settings_of_files["config.json"] = config
    sources: dict[int, list[str]] = defaultdict(list)
    for name, settings in settings_of_files.items():
        for token in ids_of(settings.get("eos_token_id"), folder / name):
            sources[token].append(name)
    if tokenizer_eos is not None:
        sources[tokenizer_eos].append("the tokenizer")
    limit = model_config.setting(config, ("vocab_size",))
    if type(limit) is not int:  # true is an int too, for Python
        limit = float("inf")
    return {token: tuple(sources[token]) for token in sorted(sources) if token < limit}


def described(stops: Mapping[int, tuple[str, ...]]) -> str:
    """Return a line about the files that name each of `stop_ids`; "" if all files agree."""
    all_sources = set().union(*stops.values())
    if all(set(sources) == all_sources for sources in stops.values()):
        return ""
    listed = "; ".join(f"{token} ({', '.join(sources)})" for token, sources in stops.items())
    return f"an answer ends at any of these tokens: {listed}"


def ids_of(value: Any, path: Path) -> list[int]:
    """Return the ids of an `eos_token_id` of the file `path`, sorted: one id, several or none."""
    if value is None:
        return []
    ids = value
    if not isinstance(value, list):
        ids = [value]
    if not all(type(number) is int and number >= 0 for number in ids):
        raise InputError(
            f"{path}: expected eos_token_id to be a token id or a list of them, found {shorten(value)}; correct it"
        )
    return sorted(set(ids))
