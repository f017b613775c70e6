"""Levels of sameness of two engine sets of one target.

Two engine sets in, each with the records of how it was made; for each level what differs, out.

R0 inputs: what convert, export and build were given, their options, code, packages, library and device. R1 choices and
R2 layer information: what the backend says of each engine. R3 golden tokens. R4 bytes of each engine, without those of
which the backend says that equal builds do not share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.files import sha256_json
from lockstep.artifacts.inspected import InspectedSet
from lockstep.artifacts.reports import GoldenReport
from lockstep.errors import InputError
from lockstep.provenance.diff import changes
from lockstep.provenance.lockfile import numbered
from lockstep.provenance.record import read_record
from lockstep.targets import Results, Target

LEVELS = {"R0": "inputs", "R1": "choices", "R2": "layer information", "R3": "golden tokens", "R4": "bytes"}
_MADE_BY = ("inputs", "options", "code", "environment", "backend")
# What of engines.json decides how engines are built. The device is compared by what of it matters.
_SETTINGS = ("backend_version", "builder_revision", "options", "precision")


@dataclass(frozen=True)
class Facts:
    """The facts of an engine set that are compared.

    levels: JSON by level. removed: by engine which bytes were left out, in words.
    """

    levels: Mapping[str, Any]
    removed: Mapping[str, tuple[str, ...]]

    def digests(self) -> dict[str, str]:
        """Return the hex sha256 by level."""
        return {level: sha256_json(value) for level, value in self.levels.items()}


def facts(
    results: Results, target: Target, found: InspectedSet, failure: str | None = None, is_run: bool = True
) -> Facts:
    """Return what is compared of the engine set of `target` in a results tree.

    found: what its backend says of it. failure: the line of a golden check that did not pass, which then has no tokens.
    is_run: whether its engines run here; without it there is no R3. Raises InputError where something was not made, or
    has no record of how it was made.
    """
    manifest = EngineSetManifest.load(results.engines(target.model, target.precision, target.backend)).to_json()
    settings = {**{name: manifest[name] for name in _SETTINGS}, "device": found.device}
    levels = {
        "R0": {**_made_by(results, target), "engines": settings},
        "R1": {name: engine.choices for name, engine in found.engines.items()},
        "R2": {name: engine.layers for name, engine in found.engines.items()},
        **({"R3": {"golden check": failure} if failure else _tokens(results, target)} if is_run else {}),
        "R4": {name: engine.sha256 for name, engine in found.engines.items()},
    }
    return Facts(levels, {name: engine.left_out for name, engine in found.engines.items() if engine.left_out})


def compare(one: Facts, other: Facts) -> dict[str, list[str]]:
    """Return by level what differs, each with its place and both values.

    Nothing where it is the same.
    """
    return {
        level: [
            f"{' / '.join(where)}: {change}"
            for where, change in changes(numbered(one.levels[level]), numbered(other.levels[level]))
        ]
        for level in one.levels
    }


def reached(same: Mapping[str, bool]) -> str:
    """Return the highest level up to which all that are there are the same.

    "none" where not even the inputs are.
    """
    found = "none"
    for level in LEVELS:
        if not same.get(level, True):
            break
        found = level if level in same else found
    return found


def _made_by(results: Results, target: Target) -> dict[str, Any]:
    found = {}
    for stage, output in (
        ("convert", results.weights(target.model, target.precision)),
        ("export", results.assembly(target.model, target.precision)),
        ("build", results.engines(target.model, target.precision, target.backend)),
    ):
        record = read_record(output)
        if record is None:
            raise InputError(
                f"{output}: expected the record of how it was made, found none of this file; run snakemake first"
            )
        key = record.key.to_json()
        found[stage] = {part: key[part] for part in _MADE_BY if part in key}
    return found


def _tokens(results: Results, target: Target) -> dict[str, Any]:
    golden = GoldenReport.load(results.golden(target.model, target.precision, target.layers, target.backend))
    return {prompt.text: list(prompt.tokens) for prompt in golden.prompts}
