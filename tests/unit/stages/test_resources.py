"""What jobs ask of a cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.stages import STAGES

RULES = Path(__file__).resolve().parents[3] / "workflow" / "rules"
# MB that the processes of one job held at their highest, of a checkpoint of that many bytes: records/clusters.md.
MEASURED = {
    542_000_000: {
        "make_checkpoint": 573, "resolve": 155, "architecture": 173, "convert": 216, "export": 661, "validate": 3719,
        "build": 211, "compare": 1295, "reference": 2149, "golden": 1960, "served": 1729,
    },
    1_906_000_000: {
        "make_checkpoint": 586, "resolve": 154, "architecture": 172, "convert": 186, "export": 697, "validate": 11458,
        "build": 211, "compare": 2324, "reference": 6254, "golden": 5261,
    },
}  # fmt: skip
# Snakemake twice more: as the job's batch step, which starts the job itself with srun.
STEP = 150


def resources() -> dict[str, tuple[float, float]]:
    """MB for any model, and bytes for each byte of weights, of each rule whose jobs may run on a node."""
    text = "".join(path.read_text() for path in sorted(RULES.glob("*.smk")))
    rules = dict(re.findall(r"^rule (\w+):\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL))
    memory = {}
    for rule, body in rules.items():
        if "localrule: True" not in body:
            numbers = re.search(r"mem_mb=memory\(([\d., ]+)\),\n +runtime=minutes\([\d, ]+\),", body)
            assert numbers, f"{rule} says neither how much memory nor how long"
            base, per_byte = (*map(float, numbers[1].split(",")), 0.0)[:2]
            memory[rule] = base, per_byte
    return memory


def test_every_stage_that_may_run_on_a_node_says_what_it_needs() -> None:
    assert set(resources()) >= set(STAGES) - {"config", "fetch", "fetch_adapters", "quality"}, (
        "these run where Snakemake runs"
    )


@pytest.mark.parametrize("weight_bytes", MEASURED)
def test_a_job_asks_for_a_third_more_than_was_measured(weight_bytes: int) -> None:
    memory = resources()
    for stage, peak in MEASURED[weight_bytes].items():
        base, per_byte = memory[stage]
        assert (peak + STEP) * 4 / 3 <= base + per_byte * weight_bytes / 1e6 <= peak * 3 + 4000, stage
