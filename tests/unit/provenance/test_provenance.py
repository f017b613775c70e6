"""Statements: the published fields of in-toto and SLSA, their subjects, and verify's findings for older ones."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from demo_model import CONFIG, DEMO
from packageurl import PackageURL

from lockstep.artifacts.files import read_json, sha256_file, write_json
from lockstep.artifacts.statement import BuildKey, Statement, statement_path
from lockstep.checkpoint import resolve_architecture
from lockstep.config.sources import REPOSITORY
from lockstep.errors import InputError
from lockstep.provenance import code_identity
from lockstep.provenance import run as stage
from lockstep.provenance.verify import verify
from lockstep.report.about import now
from lockstep.stages import STAGES
from lockstep.targets import Results

NAMES = {"model": "demo-llama", "precision": "fp16", "backend": "onnxruntime"}

# The published formats. Statement, descriptor: github.com/in-toto/attestation/blob/main/spec/v1/statement.md and
# resource_descriptor.md (of a descriptor at least one of uri, digest, content; of a subject the digest). Predicate:
# slsa.dev/spec/v1.0/provenance (buildType, externalParameters and builder.id are required; version maps strings to
# strings; times are RFC 3339 in UTC; fields of one's own are named vendor_field).
URI = {"type": "string", "pattern": "^[a-z][a-z0-9+.-]*:.+$"}
TIME = {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$"}
OWN = {"^[a-z]+_": True}
DESCRIPTOR = {
    "type": "object",
    "anyOf": [{"required": [name]} for name in ("uri", "digest", "content")],
    "properties": {
        "name": {"type": "string"},
        "uri": URI,
        "digest": {
            "type": "object",
            "minProperties": 1,
            "properties": {"sha256": {"type": "string", "pattern": "^[0-9a-f]{64}$"}},
            "additionalProperties": {"type": "string"},
        },
        "content": {"type": "string", "contentEncoding": "base64"},
        "downloadLocation": URI,
        "mediaType": {"type": "string"},
        "annotations": {"type": "object"},
    },
    "additionalProperties": False,
}


def fields(required: list[str], **properties: dict) -> dict:
    return {
        "type": "object", "required": required, "properties": properties, "patternProperties": OWN,
        "additionalProperties": False,
    }  # fmt: skip


SCHEMA = {
    **fields(
        ["_type", "subject", "predicateType", "predicate"],
        _type={"const": "https://in-toto.io/Statement/v1"},
        subject={"type": "array", "minItems": 1, "items": {**DESCRIPTOR, "required": ["digest"]}},
        predicateType={"const": "https://slsa.dev/provenance/v1"},
        predicate=fields(
            ["buildDefinition", "runDetails"],
            buildDefinition=fields(
                ["buildType", "externalParameters"],
                buildType=URI,
                externalParameters={"type": "object"},
                internalParameters={"type": "object"},
                resolvedDependencies={"type": "array", "items": DESCRIPTOR},
            ),
            runDetails=fields(
                ["builder"],
                builder=fields(
                    ["id"],
                    id=URI,
                    version={"type": "object", "additionalProperties": {"type": "string"}},
                    builderDependencies={"type": "array", "items": DESCRIPTOR},
                ),
                metadata=fields([], invocationId={"type": "string"}, startedOn=TIME, finishedOn=TIME),
                byproducts={"type": "array", "items": DESCRIPTOR},
            ),
        ),
    ),
    "patternProperties": {},  # in-toto leaves a statement no room for fields of one's own
}


def build(results: Results) -> Path:
    job = STAGES["build"].job(CONFIG, results.root, NAMES)
    stage.run(job)
    return statement_path(job.output)


@pytest.fixture
def results(demo: Results, tmp_path: Path) -> Results:
    """The demo's graphs in fp16 with the manifest of their sources; no engines."""
    results = Results(tmp_path / "results")
    shutil.copytree(demo.assembly("demo-llama", "fp16").parent, results.assembly("demo-llama", "fp16").parent)
    for name, make in (
        (
            "architecture",
            lambda: resolve_architecture("resources/demo-llama", DEMO, results.architecture("demo-llama")),
        ),
        ("export", lambda: None),
    ):
        stage.run(STAGES[name].job(CONFIG, results.root, NAMES), make)
    return results


def test_it_has_the_fields_that_are_published(results: Results) -> None:
    statement = json.loads(build(results).read_text())
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.Draft202012Validator(SCHEMA).validate(statement)


def test_builder_and_build_type_are_a_page_of_the_manual(results: Results) -> None:
    predicate = json.loads(build(results).read_text())["predicate"]
    urls = {predicate["buildDefinition"]["buildType"], predicate["runDetails"]["builder"]["id"]}
    (page,) = {PackageURL.from_string(url).subpath for url in urls}
    assert page is not None and (REPOSITORY / page).is_file()
    named = re.findall(r"`(\w+)`", (REPOSITORY / page).read_text())
    assert {*predicate["buildDefinition"]} - {"buildType"} <= {*named}
    assert set(predicate["runDetails"]["builder"]) - {"id", "version"} <= {*named}


def test_a_build_that_fails_before_it_writes_keeps_the_earlier_one(results: Results) -> None:
    path = build(results)
    before = path.read_bytes()

    def fail() -> None:
        raise InputError("no room")

    with pytest.raises(InputError, match="no room"):
        stage.run(STAGES["build"].job(CONFIG, results.root, NAMES), fail)
    assert path.read_bytes() == before and {
        finding.status for finding in verify(results.root) if finding.name.startswith("demo-llama/fp16/engines")
    } == {"same"}


def test_a_build_that_fails_after_it_wrote_leaves_none(results: Results) -> None:
    path = build(results)

    def fail() -> None:
        engines = path.with_name("engines.json")
        write_json(engines, {**read_json(engines), "backend_version": "0.0"})
        raise InputError("no room")

    with pytest.raises(InputError, match="no room"):
        stage.run(STAGES["build"].job(CONFIG, results.root, NAMES), fail)
    assert not list(path.parent.glob("*.json"))


def test_a_statement_of_other_options_goes_with_the_job_that_failed(results: Results) -> None:
    """As Snakemake leaves the engines of before, which it takes for those of the job."""
    build(results)
    job = STAGES["build"].job(CONFIG, results.root, NAMES)
    stage.forget_other(job)
    assert statement_path(job.output).is_file(), "the same is what would be made again"
    stage.forget_other(replace(job, options={"options": {"optimization_level": 1}}))
    assert job.output.is_file() and not statement_path(job.output).is_file()


def test_a_checkpoint_whose_fetching_failed_is_not_resolved(results: Results) -> None:
    """Its manifest is of an earlier source: no statement is of it."""
    source = results.source(NAMES["model"])
    write_json(source, {"format": "lockstep.source/1"})
    with pytest.raises(InputError, match=r"source\.json: expected its statement"):
        stage.run(replace(STAGES["resolve"].job(CONFIG, results.root, NAMES), inputs={"fetched": source}))


def test_it_names_what_came_out_and_all_that_went_in(results: Results) -> None:
    path = build(results)
    statement = json.loads(path.read_text())
    engines = path.parent
    subjects = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    assert subjects == {
        file.name: sha256_file(file)
        for file in engines.iterdir()
        if file.suffix == ".onnx" or file.name == "engines.json"
    }
    definition = statement["predicate"]["buildDefinition"]
    details = statement["predicate"]["runDetails"]
    dependencies = {item["name"]: item for item in definition["resolvedDependencies"]}
    assert dependencies["graphs/middle.onnx"]["digest"]["sha256"] == sha256_file(
        results.assembly("demo-llama", "fp16").with_name("middle.onnx")
    )
    assert dependencies["checkpoint/config.json"]["digest"]["sha256"] == sha256_file(DEMO / "config.json")
    assert "checkpoint/model.safetensors" not in dependencies, "engines hold no weights"
    assert dependencies["onnxruntime"]["uri"] == f"pkg:pypi/onnxruntime@{code_identity.read_pins()['onnxruntime']}"
    names = {"precision": "fp16", "backend": "onnxruntime"}
    options = STAGES["build"].options(CONFIG, NAMES)
    assert definition["externalParameters"] == {"stage": "build", "names": names, "options": options}
    assert definition["internalParameters"]["buildKey"] == Statement.load(path).key.sha256
    code = {item["name"]: item["digest"]["sha256"] for item in details["builder"]["builderDependencies"]}
    assert (
        code["lockstep/backends/onnxruntime"]
        == code_identity.code_digests("stages.build", "onnxruntime")["lockstep/backends/onnxruntime"]
    )
    assert str(results.root) not in path.read_text()


def test_a_model_of_the_hub_is_named_at_its_commit(results: Results) -> None:
    manifest = results.architecture("demo-llama")
    write_json(manifest, {**read_json(manifest), "source": "hf:org/name@main"})
    write_json(
        results.source("demo-llama"),
        {"format": "lockstep.source/1", "source": "hf:org/name@main", "commit": "ab" * 20, "files": []},
    )
    dependencies = json.loads(build(results).read_text())["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert (
        next(item["uri"] for item in dependencies if item["name"] == "checkpoint/config.json")
        == f"pkg:huggingface/org/name@{'ab' * 20}#config.json"
    )


@pytest.mark.parametrize("name, version", [("openvino", "2026.1"), ("openvino", "2026.2"), ("tensorrt", "10.6.0")])
def test_libraries_of_a_backend_are_dependencies_and_no_packages_of_the_key(name: str, version: str) -> None:
    backend = {"name": name, "version": version, "device": {}, "libraries": {"cublas": "13.1"}}
    key = BuildKey("build", NAMES, {"assembly": "ab"}, {}, {}, {"numpy": "2.0", "openvino": "2026.1"}, backend)
    statement = Statement(key, {"engines.json": "0" * 64})
    read = Statement.from_json(json.loads(statement.to_bytes()))
    assert read == statement and read.key.sha256 == key.sha256
    dependencies = statement.to_json()["predicate"]["buildDefinition"]["resolvedDependencies"]
    urls = [item.get("uri", "") for item in dependencies]
    assert any(url.endswith(f"/{name}@{version}") for url in urls) and "pkg:generic/cublas@13.1" in urls


def test_two_builds_make_the_same_statements_which_hold_no_time(results: Results) -> None:
    first = build(results)
    data = first.read_bytes()
    first.unlink()
    assert build(results).read_bytes() == data
    assert not any(re.search(rb"20\d\d-\d\d-\d\dT", path.read_bytes()) for path in first.parent.glob("*.json"))


@pytest.mark.parametrize("text", ["yesterday", "-1", "1.5", "9" * 30, "١"])
def test_a_time_of_the_source_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", text)
    with pytest.raises(InputError, match="SOURCE_DATE_EPOCH: expected seconds since 1970 as a whole number, found"):
        now()
