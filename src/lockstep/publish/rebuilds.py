"""Statements of rebuilds: others' artefacts of the same lock, signed by them, in `locks/rebuilds`.

The subjects of a statement (`lockstep.artifacts.statement`) are the files that came out, and its parameters the
target and the lock. Rebuilders agree where the files are the same, byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.artifacts.files import sha256_file
from lockstep.artifacts.statement import in_toto, package_urls, subjects
from lockstep.backends.identity import versions
from lockstep.errors import CheckError, InputError
from lockstep.provenance.lock import Lock
from lockstep.provenance.reproduce import LockComparison
from lockstep.publish import dsse
from lockstep.targets import WILDCARDS, Target

_SHA256 = re.compile("[0-9a-f]{64}")
_PACKAGES = ["numpy", "onnx", "onnxruntime", "openvino", "torch", "transformers"]


@dataclass(frozen=True)
class Agreement:
    """The rebuilders of a target whose files are the same as in its lock.

    keys: the ids of their public keys. disagreeing: files of other statements, with the first difference.
    """

    target: str
    keys: tuple[str, ...]
    disagreeing: tuple[str, ...]


def folder_of(lock: Path) -> Path:
    return lock.parent / "rebuilds"


def write(lock: Path, target: Target, rebuilt: Sequence[LockComparison], key: Path) -> Path:
    outputs = {}
    for entry in rebuilt:
        outputs.update(files(entry.where, entry.items))
    locked = {"name": lock.name, "digest": {"sha256": sha256_file(lock)}}
    packages = [{"name": name, "uri": url} for name, _, url in package_urls(versions(_PACKAGES))]
    rebuild = in_toto(outputs, {**vars(target), "lock": lock.name}, [locked, *packages])
    signer = dsse.key_id(dsse.private_key(key).public_key())
    name = f"{target}".replace("/", "-")
    return dsse.write_envelope(folder_of(lock) / f"{name}.{signer[:12]}.json", rebuild, key)


def files(where: str, items: Mapping[str, Any]) -> dict[str, str]:
    """Return {place of a lock/name: sha256} of the files at the place."""
    return {
        f"{where}/{name}": sha256
        for name, sha256 in sorted(items.items())
        if isinstance(sha256, str) and _SHA256.fullmatch(sha256)
    }


def agreements(lock_path: Path, keys: Sequence[Path], at_least: int) -> list[Agreement]:
    """Return for each rebuilt target the rebuilders who made the locked bytes.

    keys: public keys of rebuilders. Raises CheckError for a target that fewer than `at_least` of them reproduced, and
    for a lock without any rebuild.
    """
    locked = {}
    for where, items in Lock.load(lock_path).entries.items():
        locked.update(files(where, items))
    agreeing: dict[str, dict[str, str]] = {}
    disagreeing: dict[str, list[str]] = {}
    for path in sorted(folder_of(lock_path).glob("*.json")):
        rebuild, key = dsse.read_envelope(path, keys)
        try:
            rebuilt = subjects(rebuild["subject"])
            parameters = rebuild["predicate"]["buildDefinition"]["externalParameters"]
            lock_name = parameters["lock"]
            target = "/".join(str(parameters[name]) for name in WILDCARDS)
        except (LookupError, TypeError):
            raise InputError(f"{path}: expected the statement of a rebuild, found another; remove it") from None
        if lock_name != lock_path.name:
            continue
        differs = sorted(name for name, sha256 in rebuilt.items() if locked.get(name) != sha256)
        if not any(name.startswith("engines/") for name in rebuilt):
            differs.append("no engines")
        if differs:
            disagreeing.setdefault(target, []).append(f"{path}: {differs[0]}")
        else:
            agreeing.setdefault(target, {})[key] = path.name
    per_target = [
        Agreement(target, tuple(sorted(agreeing.get(target, {}))), tuple(disagreeing.get(target, ())))
        for target in sorted({*agreeing, *disagreeing})
    ]
    for agreement in per_target or [Agreement(lock_path.name, (), ())]:
        if len(agreement.keys) < at_least:
            but = "".join(f"; another result: {line}" for line in agreement.disagreeing[:1])
            raise CheckError(
                f"{agreement.target}: expected {at_least} rebuilders that agree byte for byte, found "
                f"{len(agreement.keys)} in {folder_of(lock_path)}{but}; others rebuild with `lockstep reproduce "
                f"--against LOCK --sign KEY`"
            )
    return per_target
