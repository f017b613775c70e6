"""Levels of sameness of two engine sets of one target.

In: results trees, with the records of how they were made. Out: for each level what differs.

R0 inputs: what convert, export and build were given, their options, code, packages, library and device. R3 golden
tokens. R4 the sha256 of each engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.reports import GoldenReport
from lockstep.errors import InputError
from lockstep.provenance.diff import changes
from lockstep.provenance.lockfile import numbered
from lockstep.provenance.record import read_record
from lockstep.targets import Results, Target

LEVELS = {"R0": "inputs", "R3": "golden tokens", "R4": "bytes"}
_MADE_BY = ("inputs", "options", "code", "environment", "backend")
_SETTINGS = ("backend_version", "builder_revision", "options", "precision")  # of engines.json: they decide its engines


def compared(results: Results, target: Target, failure: str | None = None, is_run: bool = True) -> dict[str, Any]:
    """Return the JSON that is compared of the engine set of `target`, by level.

    failure: the line of a golden check that did not pass, which then has no tokens. is_run: whether its engines run
    here; without it there is no R3. Raises InputError where something was not made, or has no record of how it was
    made.
    """
    engines_json = results.engines(target.model, target.precision, target.backend)
    manifest = EngineSetManifest.load(engines_json)
    stored = manifest.to_json()
    outputs = {
        "convert": results.weights(target.model, target.precision),
        "export": results.assembly(target.model, target.precision),
        "build": engines_json,
    }
    tokens: dict[str, Any] = {}
    if is_run:
        tokens = {"R3": {"golden check": failure} if failure else _tokens(results, target)}
    return {
        "R0": {
            **{stage: _made_by(output) for stage, output in outputs.items()},
            "engines": {name: stored.get(name) for name in _SETTINGS},
        },
        **tokens,
        "R4": {name: engine.sha256 for name, engine in manifest.engines.items()},
    }


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return by level what differs, each with its place and both values. Nothing where it is the same."""
    return {
        level: [
            f"{' / '.join(where)}: {change}" for where, change in changes(numbered(one[level]), numbered(other[level]))
        ]
        for level in one
    }


def reached(same: Mapping[str, bool]) -> str:
    """Return the highest level up to which all that are there are the same; "none" where the inputs are not."""
    highest = "none"
    for level, is_same in same.items():
        if not is_same:
            break
        highest = level
    return highest


def _made_by(output: Path) -> dict[str, Any]:
    record = read_record(output)
    if record is None:
        raise InputError(
            f"{output}: expected the record of how it was made, found none of this file; run `lockstep run` first"
        )
    key = record.key.to_json()
    return {part: key[part] for part in _MADE_BY if part in key}


def _tokens(results: Results, target: Target) -> dict[str, Any]:
    golden = GoldenReport.load(results.golden(target.model, target.precision, target.layers, target.backend))
    return {prompt.text: list(prompt.tokens) for prompt in golden.prompts}
