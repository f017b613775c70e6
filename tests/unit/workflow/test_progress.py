"""Progress inside a job: a line on the terminal that moves, and nothing of it in a log."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

CODE = """
import sys, time, types
from lockstep import progress
from lockstep.workflow.job import logged
progress._DELAY_S = 0
with logged(types.SimpleNamespace(log=[sys.argv[1]])):
    print("of the job", file=sys.stderr)
    for number in progress.steps(range(20), "reference", "tokens"):
        time.sleep(0.02)
    assert number == 19
    with progress.counted(40, "logits", "rows") as count_done:
        for number in range(20):
            time.sleep(0.02)
            count_done(2)
"""


def run(log: Path, stderr: int) -> None:
    environment = {**os.environ, "TERM": "xterm"}
    subprocess.run([sys.executable, "-c", CODE, str(log)], check=True, stderr=stderr, env=environment)
    assert log.read_text() == "of the job\n"


def test_a_job_shows_on_a_terminal_how_far_it_is_and_logs_nothing_of_that(tmp_path: Path) -> None:
    main, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    run(tmp_path / "log", terminal)
    line = os.read(main, 100_000).decode()
    os.close(main)
    os.close(terminal)
    assert "reference" in line
    times = r"\[\d\d:\d\d<\d\d:\d\d, +[0-9.]+"  # elapsed, remaining
    assert re.search(rf"\b1?[1-9]/20 {times} tokens/s", line)
    assert re.search(rf"logits.*\b[1-3]?[02468]/40 {times} rows/s", line), "of work that is no loop"
    with open(tmp_path / "stderr", "w+") as no_terminal:
        run(tmp_path / "log", no_terminal.fileno())
    assert not (tmp_path / "stderr").read_text()
