"""What a target is made of, as a CycloneDX 1.6 ML-BOM (https://cyclonedx.org/capabilities/mlbom).

A finished target's manifests and records in; the document out, as JSON: the model with its card, the checkpoint's
files, the files that were made of them, and the libraries that computed. It holds no time: the same target gives the
same bytes.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep import __version__
from lockstep.artifacts.build_record import BuildKey
from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.files import sha256_json
from lockstep.artifacts.weights import WeightsManifest
from lockstep.errors import InputError
from lockstep.manifests.digest_cache import digest
from lockstep.manifests.manifest_files import named_files
from lockstep.provenance.record import read_record
from lockstep.provenance.slsa import libraries, purl
from lockstep.targets import Results, Target

_PROPERTY = "lockstep:"
_MODEL = "model"
_CHECKPOINT = "checkpoint"


def bill(results: Results, target: Target) -> dict[str, Any]:
    """Return the ML-BOM of a finished target. Raises InputError where something of it is not there."""
    checkpoint = CheckpointManifest.load(results.checkpoint(target.model))
    engines_json = results.engines(target.model, target.precision, target.backend)
    manifests = {
        "weights": results.weights(target.model, target.precision),
        "graphs": results.assembly(target.model, target.precision),
        "engines": engines_json,
    }
    keys = {kind: _key(path) for kind, path in manifests.items()}
    made = {
        kind: [_file(f"{kind}/{name}", sha256) for name, sha256 in _files(path)] for kind, path in manifests.items()
    }
    packages = [
        {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}
        for name, version, url in libraries(keys.values())
    ]
    used = {kind: [url for _, _, url in libraries([key])] for kind, key in keys.items()}
    origin = _checkpoint(results, target, checkpoint)
    body = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": _model(results, target, checkpoint),
            "tools": {"components": [{"type": "application", "name": "lockstep-engines", "version": __version__}]},
        },
        "components": [origin, *(part for parts in made.values() for part in parts), *packages],
        "dependencies": [
            {"ref": _MODEL, "dependsOn": sorted(part["bom-ref"] for parts in made.values() for part in parts)},
            *(
                {"ref": part["bom-ref"], "dependsOn": sorted([_CHECKPOINT, *used[kind]])}
                for kind, parts in made.items()
                for part in parts
            ),
        ],
    }
    return {"serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, sha256_json(body))}", **body}


def _key(manifest: Path) -> BuildKey:
    record = read_record(manifest) if manifest.is_file() else None
    if record is None:
        raise InputError(
            f"{manifest}: expected it with the record of how it was made, found none; run `lockstep run` first"
        )
    return record.key


def _files(manifest: Path) -> Iterator[tuple[str, str]]:
    yield manifest.name, digest(manifest)
    for file in sorted(named_files(manifest), key=lambda file: file.path):
        yield file.path.name, file.sha256


def _file(name: str, sha256: str) -> dict[str, Any]:
    return {"type": "file", "bom-ref": name, "name": name, "hashes": [{"alg": "SHA-256", "content": sha256}]}


def _checkpoint(results: Results, target: Target, checkpoint: CheckpointManifest) -> dict[str, Any]:
    """Return the checkpoint that all was made of, with its files; of the hub by its commit."""
    url = purl(checkpoint.source, results.source(target.model))
    component = {
        "type": "machine-learning-model",
        "bom-ref": _CHECKPOINT,
        "name": checkpoint.source if url else target.model,
        "components": [_file(f"{_CHECKPOINT}/{file.path}", file.sha256) for file in checkpoint.files],
    }
    return component | ({"version": url.rpartition("@")[2], "purl": url} if url else {})


def _model(results: Results, target: Target, checkpoint: CheckpointManifest) -> dict[str, Any]:
    engines = EngineSetManifest.load(results.engines(target.model, target.precision, target.backend))
    weights = WeightsManifest.load(results.weights(target.model, target.precision))
    quantized = checkpoint.quantization
    bits = "/".join(map(str, sorted(set(quantized.bits.values())))) if quantized else None
    properties: Mapping[str, Any] = {
        "target": target,
        "precision": target.precision,
        "group-size": weights.group_size,
        "checkpoint-bits": bits,
        "backend": engines.backend,
        "backend-version": engines.backend_version,
        "device": engines.device.get("name") or engines.device.get("architecture"),
        "layers": checkpoint.num_hidden_layers if target.layers == "all" else target.layers,
    }
    architectures = checkpoint.config.get("architectures") or [checkpoint.model_type]
    return {
        "type": "machine-learning-model",
        "bom-ref": _MODEL,
        "name": target.model,
        "version": engines.digest or "",
        "modelCard": {
            "modelParameters": {
                "task": "text-generation",
                "architectureFamily": checkpoint.model_type,
                "modelArchitecture": str(architectures[0]),
                "inputs": [{"format": "text"}],
                "outputs": [{"format": "text"}],
            }
        },
        "properties": [
            {"name": f"{_PROPERTY}{name}", "value": str(value)}
            for name, value in properties.items()
            if value is not None
        ],
    }
