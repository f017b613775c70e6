"""Peers of `bench small-weights`: the processes that answer, with a script of this test's in place of theirs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks import peer_steps
from benchmarks.peer_steps import PEERS, Peer, PeerProcess
from benchmarks.small_weights import _compared

from lockstep.errors import CheckError

SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {runners!r})
from steps_side import main

def make(job):
    print("libraries print on stdout")
    Path(job["out"], "model").write_text("made")

def opened(job):
    def start(prompts):
        time.sleep(0.02 * prompts.shape[1])
        if len(prompts) > job["batch"]:
            raise SystemExit("too many requests")
        return lambda: time.sleep(0.01 * len(prompts))
    return start

main(("numpy",), make, opened)
"""


@pytest.fixture
def peer(tmp_path, monkeypatch):
    runners = Path(peer_steps.__file__).parent / "peers_runners"
    (tmp_path / "script.py").write_text(SCRIPT.format(runners=str(runners)))
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps({"vocab_size": 300}))
    stamp = tmp_path / "envs" / "own" / "pins.sha256"
    stamp.parent.mkdir(parents=True)
    stamp.write_text("the pins")
    monkeypatch.setitem(PEERS, "own", Peer(str(tmp_path / "script.py"), "own.txt", ""))
    monkeypatch.setattr(peer_steps, "environment_python", lambda work, pins: sys.executable)
    opened = PeerProcess("own", tmp_path, tmp_path / "checkpoint", 2, 64, 1, False)
    yield opened
    opened.close()


def test_a_peer_answers_with_the_seconds_of_a_step_and_of_a_prompt(peer, tmp_path):
    assert peer.versions == {"numpy": np.__version__}
    assert peer.steps(2, 3, 4) >= 0.02 > 0 and peer.prompt(5) >= 0.1
    assert (tmp_path / "out" / "checkpoint-own" / "model").read_text() == "made"
    assert "libraries print on stdout" in (tmp_path / "jobs" / "steps-own.log").read_text()


def test_a_peer_that_ends_is_one_line_that_names_its_log(peer):
    with pytest.raises(CheckError, match=r"^own: expected an answer, found that it ended with 1; see \S+own.log$"):
        peer.steps(3, 1, 1)


def test_ratios_are_of_the_same_rounds():
    times = {"fp32": [8.0, 4.0], "w4a16": [2.0, 1.0], "genai": [1.0, 1.0]}
    found = _compared({"bf16": {"fp32": [6.0], "bf16": [3.0]}, "w4a16": times}, "seconds")
    assert found["seconds"]["fp32"] == {"min": 4.0, "median": 6.0, "max": 8.0}
    assert found["speed_relative_to_fp32"]["genai"] == {"min": 4.0, "median": 6.0, "max": 8.0}
    assert found["speed_relative_to_fp32"]["bf16"]["median"] == 2.0
    assert found["speed_relative_to_peers"]["w4a16"]["genai"] == {"min": 0.5, "median": 0.75, "max": 1.0}


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
def test_the_environments_of_peers_are_pinned(peer):
    lines = (Path(peer_steps.__file__).parents[1] / "envs" / peer.pins).read_text().splitlines()
    pins = [line for line in lines if not line.startswith(("#", "--no-binary"))]
    assert pins and all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pins)
