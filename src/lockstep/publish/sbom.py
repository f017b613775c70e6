"""The bill of materials of a target, a CycloneDX 1.7 ML-BOM (https://cyclonedx.org/capabilities/mlbom).

A finished target's manifests and statements in; the document out, as JSON: the model with its card, the checkpoint's
files, the files that were made of them, and the libraries of each stage. The `cyclonedx` library writes it, but for the
model card, which it lacks. It has no time: the same target has the same bytes.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import uuid
from pathlib import Path

import yaml
from cyclonedx.contrib.hash.factories import HashTypeFactory
from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import License
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot7
from packageurl import PackageURL

from lockstep import __version__
from lockstep.artifacts.checkpoint import CheckpointManifest
from lockstep.artifacts.engines import EngineSetManifest
from lockstep.artifacts.statement import libraries
from lockstep.artifacts.weights import WeightsManifest
from lockstep.manifests.digest_cache import digest
from lockstep.manifests.manifest_files import named_files
from lockstep.provenance.statements import purl, stated
from lockstep.targets import Results, Target

_PROPERTY = "lockstep:"
_CARD = "README.md"  # of a checkpoint; its front matter is YAML
_BY_INSTALLER = ("INSTALLER", "REQUESTED", "direct_url.json")  # files of dist-info that pip adds to a wheel's


def bill(results: Results, target: Target) -> str:
    """Return the ML-BOM of a finished target. Raises InputError where a part of it is missing."""
    manifest = results.checkpoint(target.model)
    checkpoint = CheckpointManifest.load(manifest)
    stages = {
        "weights": results.weights(target.model, target.precision),
        "graphs": results.assembly(target.model, target.precision),
        "engines": results.engines(target.model, target.precision, target.backend),
    }
    origin = _checkpoint(results, target, checkpoint)
    model = _model(results, target, checkpoint)
    for component in (origin, model):
        component.licenses.update(card_licenses(checkpoint.folder_of(manifest)))
    tool = Component(type=ComponentType.APPLICATION, name="lockstep-engines", version=__version__)
    bom = Bom(metadata=BomMetaData(component=model, tools=ToolRepository(components=[tool])))
    bom.components.add(origin)
    for kind, path in stages.items():
        used = [library_component(*library) for library in libraries(stated(path).key)]
        bom.components.update(used)
        files = {path.name: digest(path), **{file.path.name: file.sha256 for file in named_files(path)}}
        for name, sha256 in files.items():
            file = _file(f"{kind}/{name}", sha256)
            bom.components.add(file)
            bom.register_dependency(file, [origin, *used])
            bom.register_dependency(model, [file])
    return _text(bom, checkpoint)


def _text(bom: Bom, checkpoint: CheckpointManifest) -> str:
    """Return the document, with the model card that the library lacks and without the time that it adds."""
    document = json.loads(JsonV1Dot7(bom).output_as_string())
    del document["metadata"]["timestamp"]
    del document["serialNumber"]  # a random one: below it is computed from the document
    architectures = checkpoint.config.get("architectures") or [checkpoint.model_type]
    document["metadata"]["component"]["modelCard"] = {
        "modelParameters": {
            "task": "text-generation",
            "architectureFamily": checkpoint.model_type,
            "modelArchitecture": str(architectures[0]),
            "inputs": [{"format": "text"}],
            "outputs": [{"format": "text"}],
        }
    }
    document["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document, sort_keys=True))}"
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def _file(name: str, sha256: str) -> Component:
    hashes = [HashTypeFactory().from_composite_str(f"sha256:{sha256}")]
    return Component(type=ComponentType.FILE, name=name, bom_ref=name, hashes=hashes)


def library_component(name: str, version: str, url: str) -> Component:
    """Return a package or library of a stage, with pip's digests where this version is installed."""
    component = Component(name=name, version=version, bom_ref=url, purl=PackageURL.from_string(url))
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return component
    # Statements record the plain version of a build such as 2.9.0+cpu.
    if package.version.partition("+")[0] != version:
        return component
    archive = json.loads(package.read_text("direct_url.json") or "{}").get("archive_info", {})
    for algorithm, value in archive.get("hashes", {}).items():
        component.hashes.add(HashTypeFactory().from_composite_str(f"{algorithm}:{value}"))
    component.properties.add(Property(name=f"{_PROPERTY}RECORD-sha256", value=_record_sha256(package)))
    component.licenses.update(_licenses(package.metadata))
    return component


def _record_sha256(package: importlib.metadata.Distribution) -> str:
    """Return the sha256 of the lines of a package's RECORD that its wheel has too, sorted.

    They list each file with its digest. Lines that the installer adds differ between machines: programs, bytecode.
    """
    wheel_lines = []
    for line in (package.read_text("RECORD") or "").splitlines():
        path = line.partition(",")[0]
        if ",sha256=" in line and not path.startswith("..") and not path.endswith(_BY_INSTALLER):
            wheel_lines.append(line)
    return hashlib.sha256("\n".join(sorted(wheel_lines)).encode()).hexdigest()


def _licenses(metadata: importlib.metadata.PackageMetadata) -> list[License]:
    """Return the licences in METADATA: an SPDX expression, else the field of older packages, else the classifiers."""
    factory = LicenseFactory()
    for field in ("License-Expression", "License"):
        for text in metadata.get_all(field) or []:
            if "\n" not in text:  # several lines are the licence's whole text
                return [factory.make_from_string(text)]
    classifiers = [text for text in metadata.get_all("Classifier") or [] if text.startswith("License ::")]
    return [factory.make_from_string(text.rpartition(" :: ")[2]) for text in classifiers]


def card_licenses(folder: Path) -> list[License]:
    """Return the licence in the front matter of a checkpoint's card; none without one."""
    try:
        before, front, _ = (folder / _CARD).read_text().split("---\n", 2)
        # Front matter opens the file; elsewhere `---` is a horizontal rule.
        if before:
            return []
        card = yaml.safe_load(front)
        name = card["license"]
        if name == "other":
            name = card["license_name"]
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        return []
    return [LicenseFactory().make_from_string(str(name))]


def _checkpoint(results: Results, target: Target, checkpoint: CheckpointManifest) -> Component:
    """Return the checkpoint with its files; one of the hub with its commit."""
    component = Component(
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref="checkpoint",
        name=target.model,
        components=[_file(f"checkpoint/{file.path}", file.sha256) for file in checkpoint.files],
    )
    url = purl(checkpoint.source, results.source(target.model))
    if url:
        component.name = checkpoint.source
        component.version = url.rpartition("@")[2]
        component.purl = PackageURL.from_string(url)
    return component


def _model(results: Results, target: Target, checkpoint: CheckpointManifest) -> Component:
    engines = EngineSetManifest.load(results.engines(target.model, target.precision, target.backend))
    weights = WeightsManifest.load(results.weights(target.model, target.precision))
    checkpoint_bits = None
    if checkpoint.quantization:
        checkpoint_bits = "/".join(map(str, sorted(set(checkpoint.quantization.bits.values()))))
    layers = target.layers
    if layers == "all":
        layers = checkpoint.num_hidden_layers
    properties = {
        "target": target,
        "precision": target.precision,
        "group-size": weights.group_size,
        "checkpoint-bits": checkpoint_bits,
        "backend": engines.backend,
        "backend-version": engines.backend_version,
        "device": engines.device.get("name") or engines.device.get("architecture"),
        "layers": layers,
    }
    return Component(
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref="model",
        name=target.model,
        version=engines.digest or "",
        properties=[
            Property(name=f"{_PROPERTY}{name}", value=str(value))
            for name, value in properties.items()
            if value is not None
        ],
    )
