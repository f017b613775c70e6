"""Verify that each artefact of a results tree is as in its statement and as locked.

A results tree, and locks, in; a finding for each artefact out. Only the standard library, at the speed of the disk.

Each file is compared with its statement, and each artefact with the lock. `same`: as stated, and as locked.
`different`, `missing`: not so. `unknown`: neither has it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.artifacts import formats
from lockstep.artifacts.files import describe, has_digest, read_json
from lockstep.artifacts.statement import SUFFIX, Statement
from lockstep.artifacts.summary import Summary
from lockstep.errors import InputError, LockstepError
from lockstep.manifests.digest_cache import THREADS, Expected, digest
from lockstep.manifests.manifest_files import named_files
from lockstep.provenance.lock import ENGINES, Lock, compared, is_absent, kind_of
from lockstep.provenance.statements import statement_paths
from lockstep.targets import Results

SAME = "same"
DIFFERENT = "different"
MISSING = "missing"
UNKNOWN = "unknown"
_NO_MODELS = ("logs", "benchmarks", "report")  # folders of the results tree
_MEASURED = (formats.SPEED, formats.REPRODUCTION, formats.BUILD_COSTS)  # measurements, which no statement names


@dataclass(frozen=True)
class Finding:
    """An artefact and whether it is the same.

    name: its path below the results, or its place in the lock. reason: why, where it is not the same.
    """

    status: str
    name: str
    reason: str = ""

    def __str__(self) -> str:
        return " ".join(f"{self.status:<9} {self.name}{': ' * bool(self.reason)}{self.reason}".splitlines())


def verify(
    results: Path, locks: Mapping[str, Path] = {}, models: tuple[str, ...] = (), deep: bool = False
) -> list[Finding]:
    """Compare a results tree with its statements, and models with their locks.

    locks: {model: lock file}. models: only these, by default all. deep: hash large files also where size and times have
    not changed since the last time.
    """
    results = Path(os.path.realpath(results))
    folders = [results / model for model in models]
    if not models and results.is_dir():
        folders = sorted(path for path in results.iterdir() if path.is_dir() and path.name not in _NO_MODELS)
    config = results / "config.json"
    present = [config] if os.path.lexists(config) else []
    findings = _files(results, sorted(results.glob(f"*{SUFFIX}")), present, deep)
    for folder in folders:
        # Paths in its manifests are relative to the real folder.
        linked = Path(os.path.realpath(folder))
        findings += _files(results, statement_paths(linked), list(_walk(linked)), deep)
        if folder.name in locks:
            findings += _locked(folder, locks[folder.name])
    for model in sorted(locks):
        if not (results / model).is_dir() and model not in models:
            findings.append(Finding(MISSING, model, f"nothing in {results}, but a lock: run `lockstep run`"))
    return findings


def _files(results: Path, stated: list[Path], present: list[Path], deep: bool) -> list[Finding]:
    """Return findings on the files of the statements `stated`, and on those of `present` that none of them names."""
    expected: dict[str, str] = {}
    findings: list[Finding] = []
    for path in stated:
        try:
            expected |= {os.path.normpath(file.path): file.sha256 for file in _files_of_statement(path)}
            findings.append(Finding(SAME, _name(path, results)))
        except LockstepError as error:
            findings.append(Finding(DIFFERENT, _name(path, results), _reason(error)))
    # Threads, for hashlib releases the interpreter lock.
    with ThreadPoolExecutor(THREADS) as pool:
        findings += pool.map(lambda item: _compare(Path(item[0]), item[1], results, deep), sorted(expected.items()))
    named = {*expected, *map(os.path.normpath, stated)}
    findings += [_without_statement(path, results) for path in present if os.path.normpath(path) not in named]
    return sorted(findings, key=lambda finding: finding.name)


def _files_of_statement(path: Path) -> Iterator[Expected]:
    """Yield the output files of a statement, and those of its manifest in other folders, such as a checkpoint's."""
    manifest = path.with_name(f"{path.name.removesuffix(SUFFIX)}.json")
    outputs = Statement.load(path).outputs
    yield from (Expected(path.parent / name, sha256) for name, sha256 in outputs.items())
    if manifest.is_file() and digest(manifest) == outputs.get(manifest.name):
        yield from named_files(manifest)


def _compare(path: Path, sha256: str, results: Path, deep: bool) -> Finding:
    try:
        now = digest(path, deep)
    except FileNotFoundError:
        return Finding(MISSING, _name(path, results), "run `lockstep run`")
    except LockstepError as error:
        return Finding(DIFFERENT, _name(path, results), _reason(error))
    if now != sha256:
        return Finding(DIFFERENT, _name(path, results), f"expected sha256 {sha256[:12]}, found {now[:12]}")
    return Finding(SAME, _name(path, results))


def _without_statement(path: Path, results: Path) -> Finding:
    """Return the finding on a file that no statement names. A measurement, such as a speed, holds its own digest."""
    name = _name(path, results)
    if not path.is_file():
        return Finding(UNKNOWN, name, f"no statement names it; it is {describe(path)}")
    try:
        if path.suffix == ".json" and has_digest(path.read_bytes()):
            value = read_json(path)
            if isinstance(value, dict) and value.get("format") in _MEASURED:
                return Finding(SAME, name)
    except LockstepError as error:
        return Finding(DIFFERENT, name, _reason(error))
    return Finding(UNKNOWN, name, "no statement names it")


def _locked(folder: Path, lock_file: Path) -> list[Finding]:
    """Return findings on each entry of the lock, and on each artefact of the tree that the lock does not have."""
    try:
        lock = Lock.load(lock_file)
    except InputError as error:
        return [Finding(DIFFERENT, str(lock_file), _reason(error))]
    comparisons = compared(folder, lock)  # damaged artefacts have a finding already, as files
    # A tree holds the engines of one device, a lock those of several.
    built = {kind_of(where) for where in comparisons if where.startswith(f"{ENGINES}/")}
    absent = _not_run(folder.parent)
    findings = []
    for where in lock.entries:
        if where not in comparisons and kind_of(where) not in built and not is_absent(where, absent):
            reason = "locked, and not there, or in another version's format; run `lockstep run`"
            findings.append(Finding(MISSING, where, reason))
    for where, comparison in comparisons.items():
        reason = "; ".join(f"{'.'.join(at)} {change}" for at, change in comparison.changes)
        if not comparison.is_locked:
            findings.append(Finding(UNKNOWN, where, "not in the lock"))
        elif reason:
            findings.append(Finding(DIFFERENT, where, reason))
        else:
            findings.append(Finding(SAME, where))
    named = [replace(finding, name=f"{folder.name}: {finding.name}") for finding in findings]
    return sorted(named, key=lambda finding: finding.name)


def _not_run(results: Path) -> Collection[str]:
    """Return `not_run` of a results tree's summary; a damaged one has none."""
    try:
        return Summary.load(Results(results).summary()).not_run
    except InputError:
        return ()


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files of a model's results but temporary ones, and folders with the name of a document."""
    for path in sorted(folder.rglob("*")):
        is_document = not path.is_dir() or path.suffix == ".json"
        if is_document and not path.name.endswith((".tmp", ".failed.json", ".snakemake_timestamp")):
            yield path


def _name(path: Path, results: Path) -> str:
    """Return a path below the results; an absolute one of a file elsewhere, such as a checkpoint's."""
    relative = os.path.relpath(path, results)
    if relative.startswith("..") and os.path.isabs(path):
        return str(path)
    return relative


def _reason(error: Exception) -> str:
    """Return an error's line without the path that it opens with, which is the finding's name."""
    return str(error).partition(": ")[2] or str(error)
