"""The whole demo, recorded: no name is looked up and nothing is connected to, by any process that it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkout import Checkout

from network import TELEMETRY, Recorder


def test_the_demo_asks_nothing_of_the_network(finished: Checkout, recorder: Recorder) -> None:
    """All stages, from resolve to golden, and the summary, with the switches unset where the run was started."""
    assert (finished.results / "summary.json").is_file()
    assert not recorder.calls() and not recorder.traces()


@pytest.mark.long
def test_commands_on_its_results_ask_nothing_either(demo: Checkout, tmp_path: Path) -> None:
    recorder = Recorder.make(tmp_path / "recorder")
    user = Checkout(demo.folder, {**dict.fromkeys(TELEMETRY, ""), **recorder.environment})
    user.snakemake("--report", "results/report.html")
    user.run("lockstep", "bundle", "demo-llama/fp32/2", "--weights", "--out", "demo.tar")
    for source in ("demo-llama/fp32/2", "demo.tar"):
        user.run("lockstep", "generate", source, "--prompt", "Light", "--max-new-tokens", "2")
    for command in ("summary", "verify", "lock", "targets"):
        user.run("lockstep", command)
    assert not recorder.calls() and not recorder.traces()
