"""The benchmark of many targets: what a plan comes to a target, and bare rules that are the same jobs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import dag
from benchmarks.child import Usage

from lockstep.errors import CheckError, InputError


def used(*seconds: float) -> list[Usage]:
    return [Usage(2 * each, each, 1.0, None) for each in seconds]


def test_what_is_above_the_empty_workflow_is_shared_by_the_targets() -> None:
    spent = {
        "empty workflow": used(1.0, 1.0, 2.0),
        "plan of 10": used(1.1, 1.2, 2.4),
        "plan of 10, before": used(2.2, 2.4, 4.8),
        "bare rules of 10": used(1.0, 1.1, 2.1),
        "plan of 10 that are there": used(1.0, 1.0, 2.0),
        "nothing to do for 10": used(1.5, 1.5, 2.5),
    }
    found = dag.figures(spent, [10], {10: Usage(60.0, 1.51, 1.0, None)})
    assert found["plan_per_target"]["10"]["cpu_seconds"] == {"min": 0.01, "median": 0.02, "max": 0.04}
    assert found["plan_per_target"]["10"]["seconds"]["median"] == 0.04
    assert found["nothing_to_do_per_target"]["10"]["cpu_seconds"]["median"] == 0.05
    assert found["queue_per_job"]["10"]["cpu_seconds"] == pytest.approx(0.51 / 48, abs=1e-6)
    assert found["before_to_now"]["10"]["plan of 10, before"]["median"] == 2.0


@pytest.mark.long
def test_bare_rules_are_the_same_jobs(tmp_path: Path) -> None:
    (tmp_path / "Snakefile").write_text(dag.bare_rules(dag._config(20)))
    command = [sys.executable, "-m", "snakemake", "-n", "--quiet", "all", "--cores", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    table = (done.stdout + done.stderr).partition("Job stats:")[2]
    rows = {name: int(count) for name, count in re.findall(r"^(\w+) +(\d+)$", table, re.MULTILINE)}
    assert rows.pop("total") == len(dag._jobs(dag._config(20))) - 1  # the summary and the plots, but all
    assert rows["golden"] == 20 and rows["build"] == 4 and rows["reference"] == 10


def test_what_cannot_be_measured_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a multiple of 10, found 15"):
        dag._config(15)
    with pytest.raises(CheckError, match="exit code 1"):
        dag._bare(tmp_path / "bare", "rule all:\n    input: 'nothing'\n")
