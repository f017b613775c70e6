"""Files generated from the config's classes: the schema, the README, and the demo config."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from lockstep.config import doc
from lockstep.config.backends import backends
from lockstep.config.documents import read_document
from lockstep.config.load import load

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDER = REPOSITORY / "config"


def test_generated_files_are_up_to_date(tmp_path):
    """Else run `python -m lockstep.config.doc --write config`."""
    command = [sys.executable, "-m", "lockstep.config.doc", "--write", str(tmp_path / "config")]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}, check=True)
    for name in doc.generated():
        assert (tmp_path / "config" / name).read_text() == (FOLDER / name).read_text(), name


def test_the_demo_fits_its_checkpoint_and_the_schema():
    config = load(FOLDER / "config.yaml")
    assert config.check_sources([REPOSITORY]) == {"demo-llama": REPOSITORY / "resources" / "demo-llama"}
    # at two depths: fp32, fp16, w8a16; bf16, w4a16 on OpenVINO; fp16, w8a16 on cuda
    assert len(config.targets()) == 14
    line = "# yaml-language-server: $schema=../workflow/schemas/config.schema.yaml\n"
    assert (FOLDER / "config.yaml").read_text().startswith(line)
    jsonschema.validate(as_json(read_document(FOLDER / "config.yaml")), doc.schema())


def test_the_demo_expects_what_its_checkpoint_was_made_to_say():
    expected = json.loads((REPOSITORY / "resources" / "demo-llama" / "expected.json").read_text())
    texts = {entry["text"]: {2: entry["2"]["new_text"], "all": entry["all"]["new_text"]} for entry in expected}
    prompts = load(FOLDER / "config.yaml").models["demo-llama"].golden.prompts
    assert len(prompts) == 4
    for prompt in prompts:
        assert prompt.expected == texts[prompt.text]


def test_the_example_in_the_readme_loads(tmp_path):
    (tmp_path / "example.yaml").write_text(doc.EXAMPLE)
    config = load(tmp_path / "example.yaml")
    assert config.limits == load({"models": config.dump()["models"]}).limits, (
        "the example says that these are the defaults"
    )
    jsonschema.validate(as_json(read_document(tmp_path / "example.yaml")), doc.schema())
    assert doc.EXAMPLE in doc.readme()


MODEL = {"source": "a", "golden": {"prompts": [{"text": "a", "expected": {"all": "b"}}]}}
MISTAKES = [
    {"limit": {}}, {"limits": {"max_batch": 4}}, {"limits": {"max_batch_size": "4"}}, {"limits": {"max_batch_size": 0}},
    {"models": {"a/b": MODEL}}, {"models": {}}, {"tolerances": {"fp16": {"noise": 0}}},
]  # fmt: skip
MISTAKES_IN_A_MODEL = [
    {"layers": [0]}, {"layers": ["some"]}, {"layers": [2, 2]}, {"layers": []}, {"precisions": ["fp8"]}, {"source": 4},
    {"precisions": ["fp16", "fp16"]}, {"backends": ["metal"]}, {"golden": {"prompts": []}},
    {"golden": {"prompts": [{"text": "a", "expected": {"half": "b"}}]}},
]  # fmt: skip


def test_editors_see_the_mistakes_too():
    good = {"models": {"m": MODEL}}
    schema = jsonschema.Draft202012Validator(doc.schema())
    schema.validate(good)
    for change in (*MISTAKES, *({"models": {"m": {**MODEL, **change}}} for change in MISTAKES_IN_A_MODEL)):
        assert not schema.is_valid({**good, **change}), change


def test_the_schema_is_valid_and_names_its_draft():
    schema = yaml.safe_load((FOLDER / doc.SCHEMA).read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == jsonschema.Draft202012Validator.META_SCHEMA["$schema"]
    sections = [schema, *doc.schema()["$defs"].values()]
    assert all(section["additionalProperties"] is False for section in sections)


def test_the_workflow_catalogue_shows_all_keys():
    """It reads `properties` alone, without references (snakemake/snakemake-workflow-catalog, build_wf_pages.py)."""

    def shown(properties, prefix=""):
        for name, details in properties.items():
            yield f"{prefix}{name}"
            cells = name + details.get("description", "")
            assert not re.search(r"[\n|]", cells) and "<" not in re.sub("`[^`]*`", "", cells), "its table ends here"
            yield from shown(details.get("properties", {}), f"{prefix}{name}.")

    text = (FOLDER / doc.SCHEMA).read_text()
    assert "$ref" not in text
    rows = re.findall(r"^\| `([^`]+)` \|", doc.readme(), re.MULTILINE)
    keys = {key.replace("[]", "").replace("<name>", "NAME") for key in rows}
    keys -= set(backends())  # the table of precisions
    assert len(keys) > 80 and keys <= set(shown(yaml.safe_load(text)["properties"]))
    about = yaml.safe_load((REPOSITORY / ".snakemake-workflow-catalog.yml").read_text())["usage"]
    deployment = about["software-stack-deployment"]
    assert deployment["conda"] is True and deployment["apptainer"] is deployment["singularity"] is False
    assert about["report"] is deployment["report"] is True, "of the first form, and of today's"


def test_the_schema_that_editors_read_says_what_the_one_with_references_says():
    good = as_json(read_document(FOLDER / "config.yaml"))
    full = yaml.safe_load((FOLDER / doc.SCHEMA).read_text())
    jsonschema.validate(good, full)
    model = good["models"]["demo-llama"]
    for change in ({"layers": [0]}, {"golden": {"prompts": []}}, {"golden": {"prompts": [{"txt": "a"}]}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**good, "models": {"m": {**model, **change}}}, full)


def as_json(value):
    """The value as JSON has it, where keys are text."""
    return json.loads(json.dumps(value))
