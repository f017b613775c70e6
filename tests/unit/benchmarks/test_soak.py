"""`python -m benchmarks soak`: a short run on the real server, and what a longer one would be failed for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import soak
from benchmarks.__main__ import bench
from benchmarks.soak import PROCESSES, Sample, Soak, faults
from benchmarks.soak_requests import COMPLETED, FAILED, KINDS, Outcome
from click.testing import CliRunner

from lockstep.artifacts.files import read_json
from lockstep.targets import Results
from real_server import make_tree

MIB = 1 << 20
IDLE = Sample(dict.fromkeys(PROCESSES, 100 * MIB), dict.fromkeys(PROCESSES, 10), 0)
GOOD = Outcome("greedy", COMPLETED, 0.0, 1.0)
BAD = Outcome("greedy", FAILED, 5.0, 6.0, "greedy /v1/completions: expected HTTP 200, found 503")


def grown(name: str, by: int) -> list[Sample]:
    """Samples of which the last third has that many more MiB."""
    sample = replace(IDLE, rss={**IDLE.rss, name: (100 + by) * MIB})
    return [IDLE] * 20 + [sample] * 10


@pytest.mark.long
def test_a_short_run_finds_nothing_and_asks_everything(
    demo: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "KILLS_EVERY", 6.0)  # one kill, after 3 s
    # A run so short may have the first restart, and its loading, in its last third: 12 MiB on a busy machine.
    monkeypatch.setattr(soak, "SLACK", 32 << 20)
    monkeypatch.setattr(soak, "WARM_UP", 4.0)
    tree = make_tree(tmp_path / "results", demo)
    command = ["soak", "--target", "demo-llama/fp32/all", "--results", tree, "--minutes", 0.1, "--kills"]
    ended = CliRunner().invoke(bench, [*map(str, command), "--write", str(tmp_path)])
    assert ended.exit_code == 0, ended.output
    record = read_json(tmp_path / "bench" / "soak.json")
    assert record["faults"] == []
    assert record["kills"] == record["restarts"] == 1
    assert set(record["requests"]["kinds"]) == set(KINDS) and all(record["requests"]["kinds"].values())
    assert record["requests"]["cancelled"] and record["pages_used"]["max"] > 0 == record["pages_used"]["end"]


def test_a_run_without_faults_has_none() -> None:
    assert faults(Soak([GOOD], grown("api", 9)), IDLE, IDLE) == []


@pytest.mark.parametrize(
    ("run", "end", "expected"),
    [(Soak([GOOD, BAD], grown("api", 0)), IDLE, "requests: expected none to fail, found 1, the first: greedy"),
        (Soak([GOOD], grown("api", 11)), IDLE, "api: expected at most 1.02 times"),
        (Soak([GOOD], grown("engine", 11)), IDLE, "engine: expected at most 1.02 times"),
        (Soak([GOOD], grown("api", 0)), replace(IDLE, pages_used=1), "pages: expected 0 in use"),
        (Soak([GOOD], grown("api", 0)), replace(IDLE, descriptors={"api": 11, "engine": 10}),
            "api: expected 10 open descriptors")],
    ids=["failed", "api-memory", "engine-memory", "pages", "descriptors"],
)  # fmt: skip
def test_a_leak_is_a_fault(run: Soak, end: Sample, expected: str) -> None:
    (actual,) = faults(run, IDLE, end)
    assert actual.startswith(expected)


@pytest.mark.parametrize(("kill", "excused"), [((5.5, 7.0), True), ((0.0, 4.9), False), ((6.1, 7.0), False)])
def test_only_what_a_kill_met_may_fail(kill: tuple[float, float], excused: bool) -> None:
    assert bool(faults(Soak([BAD], grown("api", 0), [kill]), IDLE, IDLE)) is not excused
