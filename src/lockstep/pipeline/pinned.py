"""The entries of a lock: what it pins of each artefact.

In: a manifest, and the build key of its record. Out: where it stands in the lock, and what it must be, by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.artifacts.adapted import AdaptedReport
from lockstep.artifacts.adapters import AdaptersManifest
from lockstep.artifacts.build_record import BuildKey
from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.files import sha256_json
from lockstep.artifacts.reference import ReferenceManifest, ReferencePrompt
from lockstep.artifacts.reports import GoldenPrompt, GoldenReport
from lockstep.manifests.digest_cache import digest
from lockstep.manifests.manifest_files import named_files

Pinned = tuple[tuple[str, ...], dict[str, Any]]


def pin_checkpoint(manifest: Path, key: BuildKey) -> Pinned:
    value = CheckpointManifest.load(manifest)
    about = {"source": value.source, **({"commit": value.commit} if value.commit else {})}
    return ("checkpoint",), {**about, **{file.path: file.sha256 for file in value.files}}


def pin_weights(manifest: Path, key: BuildKey) -> Pinned:
    return ("precisions", key.names["precision"], "weights"), _named(manifest)


def pin_graphs(manifest: Path, key: BuildKey) -> Pinned:
    items = {**_named(manifest), manifest.name: digest(manifest)}
    return ("precisions", key.names["precision"], "graphs"), items


def pin_engines(manifest: Path, key: BuildKey) -> Pinned:
    names, device = key.names, device_name(key.backend or {})
    items = {entry.file: entry.sha256 for entry in EngineSetManifest.load(manifest).engines.values()}
    return ("precisions", names["precision"], "engines", names["backend"], device), items


def pin_reference(manifest: Path, key: BuildKey) -> Pinned:
    return ("reference", key.names["layers"]), _tokens(ReferenceManifest.load(manifest).prompts)


def pin_golden(manifest: Path, key: BuildKey) -> Pinned:
    names = key.names
    where = ("precisions", names["precision"], "golden", names["backend"], names["layers"])
    return where, _tokens(GoldenReport.load(manifest).prompts)


def pin_adapters(manifest: Path, key: BuildKey) -> Pinned:
    adapters = AdaptersManifest.load(manifest).adapters
    files = {f"{name}/{file.path}": file.sha256 for name, adapter in adapters.items() for file in adapter.files}
    commits = {f"{name}/commit": adapter.commit for name, adapter in adapters.items() if adapter.commit}
    return ("results", key.stage, "all"), {**files, **commits}


def pin_adapted(manifest: Path, key: BuildKey) -> Pinned:
    where = "/".join(value for name, value in key.names.items() if name != "model")
    prompts = AdaptedReport.load(manifest).prompts
    tokens = {f"{prompt.adapter}: {prompt.text}": " ".join(map(str, prompt.tokens)) for prompt in prompts}
    return ("results", key.stage, where), tokens


def pin_files(manifest: Path, key: BuildKey) -> Pinned:
    """Pin the manifest of a stage, and the files that it names.

    For a stage without a place of its own in the lock.
    """
    where = "/".join(value for name, value in key.names.items() if name != "model")
    return ("results", key.stage, where or "all"), {**_named(manifest), manifest.name: digest(manifest)}


def _named(manifest: Path) -> dict[str, str]:
    return {file.path.name: file.sha256 for file in named_files(manifest)}


def _tokens(prompts: Sequence[ReferencePrompt | GoldenPrompt]) -> dict[str, str]:
    """Return token ids on one line by prompt: a difference is then one line too."""
    return {prompt.text: " ".join(map(str, prompt.tokens)) for prompt in prompts}


def device_name(backend: Mapping[str, Any]) -> str:
    """Return the name of a device in a lock, from a backend's identity.

    It is the architecture or name, and the first digits of the sha256 of all that must be equal.
    """
    device = backend["device"]
    return f"{device.get('architecture') or device.get('name') or backend['name']} {sha256_json(device)[:12]}"
