"""Peers that decode in processes of their own, kept open.

So they are timed in turn with this project's engines.

In: a checkpoint of a Llama, a work folder, which keeps their environments (from the pins in `envs/peers-*.txt`) and
models. Out: seconds of a decode step and of a prompt, from `peers_runners/steps_*.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import sha256_file
from benchmarks.peers import environment_python
from lockstep import CheckError

_RUNNERS = Path(__file__).parent / "peers_runners"


@dataclass(frozen=True)
class Peer:
    """`note`: what its weights are."""

    script: str
    pins: str
    note: str


PEERS: dict[str, Peer] = {
    "genai": Peer(
        "steps_genai.py", "peers-genai.txt", "int4, groups of 32, accuracy level 4 (int8 activations); the head too"
    ),
    "llama.cpp": Peer(
        "steps_llama_cpp.py", "peers-llama-cpp.txt", "Q4_0 (groups of 32, int8 activations), the head in Q8_0"
    ),
}


class PeerProcess:
    """One peer, with its model made and opened.

    Raises CheckError, naming its log, where it cannot.
    """

    def __init__(
        self, name: str, work: Path, checkpoint: Path, batch: int, capacity: int, threads: int, cpu_time: bool
    ):
        peer, work = PEERS[name], work.resolve()
        for folder in ("jobs", "out"):
            (work / folder).mkdir(parents=True, exist_ok=True)
        self.name, self._log = name, work / "jobs" / f"steps-{name}.log"
        python = environment_python(work, peer.pins)
        out = work / "out" / f"{checkpoint.name}-{name}"
        of = sha256_file(checkpoint / "config.json") + sha256_file(work / "envs" / Path(peer.pins).stem / "pins.sha256")
        stamp = out / "of"
        if not stamp.is_file() or stamp.read_text() != of:  # a model of another shape, or made by another version
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            stamp.write_text(of)
        job: dict[str, Any] = {"checkpoint": str(checkpoint), "out": str(out), "threads": threads, "batch": batch}
        job |= {"capacity": capacity, "cpu_time": cpu_time}
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [python, str(_RUNNERS / peer.script), json.dumps(job)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, text=True,
            )  # fmt: skip
        self.versions: dict[str, str] = self._answer()["versions"]

    def steps(self, batch: int, context: int, steps: int) -> float:
        """Seconds of a decode step of `batch` requests behind `context` tokens each."""
        return self._ask({"batch": batch, "context": context, "steps": steps})

    def prompt(self, tokens: int) -> float:
        """Seconds of a prompt of so many tokens."""
        return self._ask({"prompt": tokens})

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, asked: dict[str, int]) -> float:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, which the answer says
        return float(self._answer()["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise CheckError(f"{self.name}: expected an answer, found that it ended with {code}; see {self._log}")
        return json.loads(line)
