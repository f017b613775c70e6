"""What jobs ask of a cluster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.pipeline.stages import STAGES

ON_NODES = {name: stage.resources for name, stage in STAGES.items() if stage.resources is not None}
REPOSITORY = Path(__file__).resolve().parents[2]
# MB that the processes of one job held at their highest, of a checkpoint of so many bytes: docs/clusters.md.
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


def test_every_stage_that_may_run_on_a_node_says_what_it_needs() -> None:
    assert set(ON_NODES) == set(STAGES) - {"fetch", "fetch_adapters"}, "these run where Snakemake runs"


@pytest.mark.parametrize("weight_bytes", MEASURED)
def test_a_job_asks_for_a_third_more_than_was_measured(weight_bytes: int) -> None:
    for stage, peak in MEASURED[weight_bytes].items():
        asked = ON_NODES[stage].memory_mb(weight_bytes)
        assert (peak + STEP) * 4 / 3 <= asked <= peak * 3 + 4000, stage


def test_each_attempt_asks_for_as_much_again() -> None:
    for asked in ON_NODES.values():
        assert [asked.memory_mb(10**9, attempt) for attempt in (1, 2, 3)] == [
            attempt * asked.memory_mb(10**9) for attempt in (1, 2, 3)
        ]
        assert asked.time_limit(10**9, 2) == 2 * asked.time_limit(10**9)


def test_a_larger_model_asks_for_no_less() -> None:
    for asked in ON_NODES.values():
        assert asked.memory_mb(0) <= asked.memory_mb(10**9) <= asked.memory_mb(10**11)
        assert asked.time_limit(0) <= asked.time_limit(10**9) <= asked.time_limit(10**11)


def test_each_rule_of_a_node_asks_for_what_its_own_stage_needs() -> None:
    text = "".join(path.read_text() for path in sorted((REPOSITORY / "workflow" / "rules").glob("*.smk")))
    rules = dict(re.findall(r"^rule (\w+):\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL))
    on_nodes = {rule for rule, body in rules.items() if "localrule: True" not in body}
    assert on_nodes == set(ON_NODES)
    for rule in on_nodes:
        assert f'mem_mb=memory("{rule}"),' in rules[rule] and f'runtime=minutes("{rule}"),' in rules[rule]
