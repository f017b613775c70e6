"""A stage is a rule and a file; what the package reads of the rules is what Snakemake reads."""

from __future__ import annotations

import ast
import re

import pytest

from lockstep.stages import STAGES, params
from lockstep.stages.rules import FOLDER, ends, rules
from lockstep.targets import Artefact, Results

WORKFLOW = FOLDER.parent
# What a rule says besides what the config gives.
PARAMS = {"stage", "device", "folders"}


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_has_a_rule_that_says_what_it_needs(name: str) -> None:
    rule = rules()[name]
    text = (WORKFLOW / "rules").glob("*.smk")
    assert {*rule.params} <= {*params.names(), *PARAMS} and "stage" in rule.params
    assert any(f'stage_of("{name}")' in path.read_text() for path in text), "it runs its own stage"
    assert rule.name == name and rule.output.endswith(".json")


def test_scripts_are_found_by_a_module_from_git() -> None:
    """Snakemake joins no relative path to a `gitfile`, which the table `SCRIPTS` makes up for."""
    scripts = re.findall(r"^    script:\n +(.*)$", "".join(path.read_text() for path in FOLDER.glob("*.smk")), re.M)
    assert len(scripts) > len(STAGES) and all(script.startswith('SCRIPTS["') for script in scripts)


def test_the_results_tree_has_the_paths_of_the_rules() -> None:
    """`Results` is for readers of a finished tree; files that no rule makes are named in it alone."""
    outputs = set().union(*(rule.outputs for rule in rules().values()))
    read = {value.pattern for value in vars(Results).values() if isinstance(value, Artefact)}
    summary = (FOLDER / "report.smk").read_text()
    unlisted = {pattern for pattern in read - outputs if f'"<results>/{pattern}"' not in summary}
    assert unlisted == {"{model}/{precision}/reproduce/{backend}/{layers}.json"}


def test_each_stage_is_read_by_another_or_collected() -> None:
    read = set()
    for rule in rules().values():
        for branch in rule.inputs.values():
            read |= {branch.then, branch.otherwise}
    collected = {pattern for pattern, _ in ends()}
    alone = {name for name, stage in STAGES.items() if stage.output not in read | collected}
    assert alone == {"config"}


def test_what_snakemake_parses_imports_the_standard_library_and_snakemake() -> None:
    """The workflow is parsed where the package is not installed."""
    import sys

    for path in [WORKFLOW / "Snakefile", *(WORKFLOW / "rules").glob("*.smk")]:
        lines = [line.strip() for line in path.read_text().splitlines() if line.startswith(("import ", "from "))]
        for node in ast.parse("\n".join(lines)).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
            assert {name.partition(".")[0] for name in names} <= {*sys.stdlib_module_names, "snakemake"}, path
