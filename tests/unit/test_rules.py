"""A rule says to Snakemake what its stage says to the rest of the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.stages import STAGES
from lockstep.targets import Results

WORKFLOW = Path(__file__).resolve().parents[2] / "workflow"
# Where weights are quantised a job reads other files: a function of common.smk names them.
FUNCTIONS = {"assembly_if_quantized", "of_precision"}


def rules() -> dict[str, dict[str, str]]:
    """The text of each directive of each rule."""
    text = "".join(path.read_text() for path in sorted((WORKFLOW / "rules").glob("*.smk")))
    bodies = dict(re.findall(r"^rule (\w+):\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL))
    directive = re.compile(r"^    (\w+):(.*?)(?=^    \w+:|\Z)", re.MULTILINE | re.DOTALL)
    return {rule: {name: found.strip() for name, found in directive.findall(body)} for rule, body in bodies.items()}


RULES = rules()


def entries(text: str) -> dict[str, str]:
    """Paths by name of a directive: of those without a name the first, as `""`."""
    named = re.findall(
        r"^ *(?:(\w+)=)?(?:update\(|ancient\()?(?:\"<results>/([^\"]+)\"|(\w+)(?:\(.*\))?),?\)?,?$", text, re.MULTILINE
    )
    return {name: path or function for name, path, function in reversed(named)}


def test_each_stage_has_a_rule() -> None:
    assert set(STAGES) < set(RULES)  # others, such as the summary's, need none


@pytest.mark.parametrize("name", STAGES)
def test_a_rule_has_the_inputs_outputs_and_parameters_of_its_stage(name: str) -> None:
    stage = STAGES[name]
    rule = RULES[name]
    inputs = entries(rule.get("input", ""))
    for key, pattern in stage.reads.items():
        assert inputs[key] == pattern or (key in stage.reads_quantized and inputs[key] in FUNCTIONS), key
    assert all(inputs[key] in FUNCTIONS for key in stage.reads_quantized)
    made = re.findall(r'"<results>/([^"]+)"', rule["output"])
    assert made == [stage.output, *stage.beside.values()] and all(f"{key}=" in rule["output"] for key in stage.beside)
    wildcards = re.findall(r"{(\w+)}", rule["log"])
    assert set(wildcards) == set(stage.wildcards)
    assert rule["benchmark"] == rule["log"].rstrip(",").replace("/logs/", "/benchmarks/").replace(".log", ".tsv")
    parameters = rule["params"]
    assert f'options=options_of("{name}"),' in parameters or not stage.wildcards
    assert f'key=key_of("{name}"),' in parameters or name == "config"
    assert rule["script"] == f'"../scripts/{name}.py"' and (WORKFLOW / "scripts" / f"{name}.py").is_file()


def test_the_results_tree_has_the_paths_of_the_stages() -> None:
    """`Results` is for who reads them, a stage's pattern for who makes them."""
    names = {name: f"{{{name}}}" for name in ("model", "precision", "layers", "backend")}
    renamed = {"validate": "validation", "build": "engines", "resolve": "checkpoint", "convert": "weights"}
    renamed |= {"export": "assembly", "fetch": "source", "make_checkpoint": "source"}
    renamed |= {"fetch_adapters": "adapter_sources"}
    for name, stage in STAGES.items():
        if (path := getattr(Results(), renamed.get(name, name), None)) is None:  # which nobody reads by name
            continue
        assert path(*(names[wildcard] for wildcard in stage.wildcards)) == Path("results") / stage.output, name
