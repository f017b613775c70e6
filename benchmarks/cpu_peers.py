"""`cpu-peers`: decoding on a CPU, compared with transformers, llama.cpp and onnxruntime-genai.

In: a checkpoint, or a shape: of a Llama for onnxruntime-genai, or of a Qwen3 mixture for llama.cpp. Each contestant is
a child process (`cpu_contestants/`), started for each round, so that one model is in memory at a time; the peers'
environments are made from `envs/`, and models stay in the work folder. All take rounds in turn. Out: seconds of a
decode step of one and of several requests, of prompts, memory after load and at its peak of each measurement, as a
multiple of the weights, and ratios to the better peer of the same bits, round by round.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

import lockstep
from benchmarks import options
from benchmarks.measure import THREADS_VARIABLE, deliver, spread, surroundings, thread_count
from benchmarks.shapes import checkpoint
from lockstep import CheckError

_SCRIPTS = Path(__file__).parent / "cpu_contestants"
_PINS = Path(__file__).parents[1] / "envs"
_OWN = "lockstep_steps.py"
_PARTS = ("backends/onnxruntime", "export", "onnx_tools", "weights")  # of this package, which make engine sets


class Contestant(NamedTuple):
    """bits: of weights, by which it is compared. pins: of its environment; "": this Python. head_bits: None for 8."""

    script: str
    precision: str
    bits: int
    pins: str = ""
    head_bits: int | None = None


CONTESTANTS = {
    **{
        name: Contestant(_OWN, name, bits)
        for name, bits in {"fp32": 32, "fp16": 16, "w8a16": 8, "w4a16": 4, "w8a8": 8, "w4a8": 4}.items()
    },
    "w4a8, head of 4 bits": Contestant(_OWN, "w4a8", 4, head_bits=4),
    "transformers fp32": Contestant("transformers_steps.py", "fp32", 32),
    "genai fp32": Contestant("genai_steps.py", "fp32", 32, "genai.txt"),
    "genai int4": Contestant("genai_steps.py", "int4", 4, "genai.txt"),
    "llama.cpp F16": Contestant("llama_cpp_steps.py", "F16", 16, "llama-cpp.txt"),
    "llama.cpp Q8_0": Contestant("llama_cpp_steps.py", "Q8_0", 8, "llama-cpp.txt"),
    "llama.cpp Q4_0": Contestant("llama_cpp_steps.py", "Q4_0", 4, "llama-cpp.txt"),
}
OPTIONS = (
    options.option("--model", "A checkpoint, or a shape.", "llama-1.1b", metavar="FOLDER|SHAPE"),
    options.option(
        "--set", "A setting of the shape's config, such as num_hidden_layers=2; may be given several times.",
        name="settings", many=True, metavar="NAME=JSON", parse=options.named_json,
    ),
    options.option(
        "--contestant", "All by default.", tuple(CONTESTANTS), name="contestants", many=True, choices=tuple(CONTESTANTS)
    ),
    options.number("--batch", (), "Requests at once in timed steps.  [default: 1 and 8]", name="batches", many=True),
    options.number(
        "--prompt", (), "Tokens of timed prompts.  [default: 256 and 1024]  With --batch or --prompt just these.",
        name="prompts", many=True,
    ),
    options.path("--work", "Keeps environments and models."),
    options.CONTEXT, options.STEPS, options.THREADS, options.rounds(3), options.WRITE,
)  # fmt: skip


def main(write: Path | None, **settings: Any) -> None:
    """Compare decoding on a CPU with transformers, llama.cpp and onnxruntime-genai, in turn."""
    deliver(run(**settings), write)


def run(
    model: str,
    contestants: Sequence[str],
    batches: Sequence[int],
    prompts: Sequence[int],
    context: int,
    steps: int,
    threads: int | None,
    rounds: int,
    work: Path | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure each contestant: steps after `context` tokens at each batch size, prompts, and resident memory."""
    if not batches and not prompts:
        batches = (1, 8)
        prompts = (256, 1024)
    measured = {
        **{f"step of {n}": {"batch": n, "context": context, "steps": steps} for n in batches},
        **{f"prompt of {n}": {"prompt": n} for n in prompts},
    }
    sizes = max((1, *batches)), max((context + steps, *prompts)) + 2, thread_count(threads)
    with tempfile.TemporaryDirectory() as scratch:
        place = (work or Path(scratch)).resolve()
        folder = checkpoint(model, place, settings).resolve()
        runs: dict[str, list[_Process]] = {name: [] for name in contestants}
        for _ in range(rounds):
            for name in contestants:
                with contextlib.closing(_Process(name, place, folder, *sizes)) as process:
                    for what, request in measured.items():
                        process.measure(what, request)
                runs[name].append(process)
        times = {what: _times(runs, what) for what in measured}
        numbers = _numbers(folder)
        return {
            "benchmark": "cpu_peers", "model": Path(model).name, "settings": settings or {},
            "context": context, "steps": steps, "rounds": rounds,
            "seconds": {what: _spreads(of_contestants) for what, of_contestants in times.items()},
            "speed_relative_to_better_peer": {what: _relative_to_peers(values) for what, values in times.items()},
            "peak_relative_to_weights": {what: _peaks(runs, what, numbers) for what in measured},
            "resident_megabytes": {name: _resident_megabytes(processes) for name, processes in runs.items()},
            "peers": {name: processes[0].versions for name, processes in runs.items()},
            **surroundings("onnxruntime", threads=threads),
        }  # fmt: skip


def _times(runs: Mapping[str, Sequence[_Process]], what: str) -> dict[str, list[float]]:
    seconds = {}
    for name, processes in runs.items():
        seconds[name] = [process.seconds[what] for process in processes]
    return seconds


def _spreads(times: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    return {name: spread(seconds) for name, seconds in times.items()}


def _peaks(runs: Mapping[str, Sequence[_Process]], what: str, numbers: int) -> dict[str, float]:
    """Return each contestant's peak memory as a multiple of its weights. numbers: of the checkpoint's weights."""
    peaks = {}
    for name, processes in runs.items():
        nbytes = max(process.peaks[what] for process in processes)
        peaks[name] = round(nbytes * 8 / (numbers * CONTESTANTS[name].bits), 3)
    return peaks


def _resident_megabytes(processes: Sequence[_Process]) -> float:
    return spread([process.resident_bytes / 1e6 for process in processes], 1)["median"]


def _relative_to_peers(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return how many times as fast each of ours is as the better peer of its bits; above 1 ours is faster."""
    peers = [name for name in times if CONTESTANTS[name].script != _OWN]
    speeds = {}
    for name in times.keys() - set(peers):
        same = [peer for peer in peers if CONTESTANTS[peer].bits == CONTESTANTS[name].bits]
        if same:
            best = min(same, key=lambda peer: statistics.median(times[peer]))
            ratios = [theirs / ours for theirs, ours in zip(times[best], times[name], strict=True)]
            speeds[name] = {"peer": best, **spread(ratios, 3)}
    return speeds


class _Process:
    """A contestant, with its model made and opened. Raises CheckError, naming its log, where it cannot.

    seconds, peaks: time and peak resident bytes, by measurement.
    """

    def __init__(self, name: str, work: Path, folder: Path, batch: int, capacity: int, threads: int):
        contestant = CONTESTANTS[name]
        stem = f"{folder.name}-{name.replace(',', '').replace(' ', '-')}"
        self.name = name
        out = work / "models" / stem
        self._log = work / f"{stem}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        python = _python(work, contestant.pins)
        # another model, or one made of other pins or by another version of this code, is made again
        of = _digest(folder / "config.json") + _digest(*([_PINS / contestant.pins] if contestant.pins else _made_by()))
        if not (out / "of").is_file() or (out / "of").read_text() != of:
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir(parents=True)
            (out / "of").write_text(of)
        job = {"checkpoint": str(folder), "out": str(out), "threads": threads, "batch": batch, "capacity": capacity}
        job |= {"precision": contestant.precision, "head_bits": contestant.head_bits}
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        environment |= dict.fromkeys(("OMP_NUM_THREADS", THREADS_VARIABLE), str(threads))  # of the builds too
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [python, str(_SCRIPTS / contestant.script), json.dumps(job)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, text=True,
            )  # fmt: skip
        ready = self._answer()
        self.versions: dict[str, str] = ready["versions"]
        self.resident_bytes: int = ready["resident_bytes"]
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, int] = {}

    def measure(self, what: str, request: Mapping[str, int]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the answer says
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        answer = self._answer()
        self.seconds[what] = answer["seconds"]
        self.peaks[what] = answer["peak_bytes"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise CheckError(f"{self.name}: expected an answer, found that it ended with {code}; see {self._log}")
        return json.loads(line)


def _numbers(folder: Path) -> int:
    """Return how many numbers the weights of a checkpoint are."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    return total


def _python(work: Path, pins: str) -> str:
    """Return the interpreter that has `pins`: ours, or that of an environment made now or before."""
    if not pins:
        return sys.executable
    folder = work / "envs" / Path(pins).stem
    python = folder / "bin" / "python"
    stamp = folder / "pins.sha256"
    digest = _digest(_PINS / pins)
    if stamp.is_file() and stamp.read_text() == digest:
        return str(python)
    # torch first, so that any build of it that an index has is taken
    torch = [line for line in (_PINS / pins).read_text().splitlines() if line.startswith("torch==")]
    folder.mkdir(parents=True, exist_ok=True)
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", *torch, "-r", str(_PINS / pins)],
    ):
        log = work / f"{folder.name}.log"
        with open(log, "wb") as file:
            code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file).returncode
        if code:
            raise CheckError(f"{_PINS / pins}: expected an environment with them, found exit code {code}; see {log}")
    stamp.write_text(digest)
    return str(python)


def _made_by() -> list[Path]:
    """Return the files of this package that decide what an engine set is."""
    package = Path(lockstep.__file__).parent
    files = list[Path]()
    for part in _PARTS:
        files += (package / part).rglob("*.py")
    return sorted(files)


def _digest(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
