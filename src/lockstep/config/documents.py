"""Reading of YAML and JSON files that people write.

Plain values out, or one line with the file and the line number.

Stricter than PyYAML: a key given twice in one mapping is an error (PyYAML silently takes the last), and so is every
value that it fails on in its own way (an impossible date, a number of thousands of digits, a foreign tag).
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml

from lockstep.errors import InputError, guard


def read_document(path: str | os.PathLike) -> Any:
    """Return the value in a YAML file, or a JSON file if the name ends in `.json`.

    Returns None for an empty file. Raises InputError (`file:line: ...`) when there is no such file, or it is not UTF-8,
    not YAML or JSON, or repeats a key.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: expected a readable config file; {_unreadable(path, error)}") from None
    # "-sig": editors on Windows put a byte order mark before the text.
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}:{_line(data, error.start)}: expected UTF-8 text; found byte 0x{data[error.start]:02x}"
        ) from None
    try:
        if path.suffix == ".json":
            return _read_json(path, text)
        return _read_yaml(path, text)
    except RecursionError:
        raise InputError(f"{path}: expected a config; found lists or mappings nested too deeply") from None


def typed(value: Any) -> Any:
    """Return a value of Snakemake's `--config` as YAML reads it: in mappings and lists it leaves numbers text."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    if not isinstance(value, str) or not re.fullmatch(_PLAIN, value):
        return value
    return _read_yaml(Path("--config"), value)


def check_config(path: str | os.PathLike) -> None:
    """Raise InputError for a config file that is no mapping: Snakemake's own errors name no place."""
    value = read_document(path)
    if not isinstance(value, dict):
        kind = "an empty file"
        if value is not None:
            kind = f"a {type(value).__name__}"
        raise InputError(f"{path}: expected a mapping with keys such as models; found {kind}")


def check_arguments(arguments: Sequence[str]) -> None:
    """Check the config files of a Snakemake command line. A mistake ends the process with one line and exit code 2."""
    # All other arguments belong to Snakemake, --help and abbreviations of its options too.
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--configfile", "--configfiles", nargs="+", default=[])
    with guard():
        for path in parser.parse_known_args(arguments)[0].configfile:
            check_config(path)


def _read_yaml(path: Path, text: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.reader.ReaderError as error:  # the one YAML error without a mark
        fault = f"character U+{error.character:04X}, which YAML does not allow"
        raise InputError(f"{path}:{_line(text, error.position)}: expected YAML; found {fault}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise InputError(f"{path}:{mark.line + 1}: expected YAML; {_problem(error)}") from None


def _unreadable(path: Path, error: OSError) -> str:
    """Return why a file cannot be read, and how to write the config of a checkpoint."""
    if isinstance(error, FileNotFoundError):
        return "found none; `lockstep init SOURCE` writes one"
    if os.path.isfile(path / "config.json"):  # not Path.is_file: false for a name that is too long
        return f"found a checkpoint; `lockstep init {path}` writes its config"
    if os.path.isdir(path):
        return "found a folder; name the file in it"
    return f"found {error.strerror}"


# What PyYAML says of the usual mistakes, by how it begins.
_PROBLEMS = {
    "expected <block end>": "found a line that is indented differently from those around it",
    "expected ',' or ']'": "found a list without its ]",
    "expected ',' or '}'": "found a mapping without its }",
    "mapping values are not allowed": "found a ': ' too many, or a line indented too far; put text with ': ' in quotes",
    "could not find expected ':'": "found a key without its ':'",
    "could not determine a constructor for the tag": "found a tag (!), which a config has none of",
}


def _problem(error: yaml.MarkedYAMLError) -> str:
    """Return PyYAML's words on one line, with what to do where they do not say it."""
    problem = " ".join((error.problem or error.context).split())
    if r"'\t'" in problem:
        return "found a tab: indent with spaces"
    if "expected a single document" in (error.context or ""):
        return "found a second document (---): keep one"
    if problem.startswith("found"):
        return problem
    for beginning, words in _PROBLEMS.items():
        if problem.startswith(beginning):
            return words
    return f"found a mistake: {problem}"


# Text that YAML reads as a number, bool or null. 40 characters are enough for any sensible number.
_PLAIN = r"[-+]?[0-9][0-9.eE+-]{0,40}|true|false|null"


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses repeated keys and gives every failure a line number."""

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict:
        first_lines: dict[Any, int] = {}
        pairs = []
        if isinstance(node, yaml.MappingNode):  # PyYAML itself rejects other nodes, below
            pairs = node.value
        for key_node, _ in pairs:
            # The keys << and = have no value that could be constructed.
            if key_node.tag in ("tag:yaml.org,2002:merge", "tag:yaml.org,2002:value"):
                key = key_node.value
            else:
                key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(
                    None, None, "found a list or mapping as a key", key_node.start_mark
                )
            if key in first_lines:
                problem = f"found the key {str(key)!r} twice in one mapping, first in line {first_lines[key]}"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            first_lines[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        # PyYAML's scalar constructors raise whatever int(), date() and their dictionaries raise, without a place.
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError):
            problem = f"found {str(node.value)[:40]!r}, which is no {node.tag.rpartition(':')[2]}; put text in quotes"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


def _read_json(path: Path, text: str) -> Any:
    def without_repeats(pairs: list[tuple[str, Any]]) -> dict:
        values = dict(pairs)
        if len(values) != len(pairs):
            (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            raise InputError(f"{path}: expected each key once; found {twice!r} twice in one object")
        return values

    if not text.strip():
        return None
    try:
        return json.loads(text, object_pairs_hook=without_repeats)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: expected JSON; found a mistake: {error.msg}") from None
    except ValueError as error:  # an integer of thousands of digits
        raise InputError(f"{path}: expected JSON; found a mistake: {error}") from None


def _line(text: str | bytes, position: int) -> int:
    if isinstance(text, bytes):
        return text.count(b"\n", 0, position) + 1
    return text.count("\n", 0, position) + 1
