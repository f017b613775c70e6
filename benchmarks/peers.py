"""This project side by side with other exporters, on the CPU in fp32.

One random checkpoint, every contestant's ONNX model made and decoded with.

In: a work folder and a shape (`shapes/*.json` or a file). Out: a record with seconds, memory and bytes to a runnable
model, and decode tokens/s at equal threads, round by round: in each round all contestants take their turn, each in a
process of its own, one at a time. Contestants that need other packages get an environment of their own below the work
folder, from the pins in `envs/peers-*.txt`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import lockstep
from benchmarks.child import Usage, available_memory, run_child
from benchmarks.export import SHAPES, shape_names
from benchmarks.measure import ratios, read_json, sha256_file, spread, surroundings, write_json
from lockstep import CheckError, InputError

REPOSITORY = Path(__file__).resolve().parents[1]
OURS, REFERENCE = "lockstep", "transformers"
LIMIT = 9 * 60  # seconds for one contestant's export or decoding
_RUNNERS = Path(__file__).parent / "peers_runners"
_ENVIRONMENT_LIMIT = 30 * 60  # seconds: some packages are built from source
_BUILD = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"}  # llama.cpp for this CPU, without what reads pictures
_BASE = 1 << 30  # bytes that any contestant takes for its packages


@dataclass(frozen=True)
class Contestant:
    """A contestant of the comparison.

    `memory`: how many times the checkpoint its export and its decoding are expected to hold; with less free they are
    skipped.
    """

    label: str
    script: str
    memory: float
    pins: str | None = None
    exports: bool = True
    notes: tuple[str, ...] = ()


CONTESTANTS: dict[str, Contestant] = {
    OURS: Contestant("lockstep", "run_lockstep.py", 2),
    "optimum": Contestant(
        "optimum",
        "run_optimum.py",
        3,
        "peers-optimum.txt",
        notes=(
            "optimum-onnx 0.1.0, the newest, asks for transformers below 4.58: it ran with 4.57.6. Its "
            "own check against torch was left out.",
        ),
    ),
    "genai": Contestant(
        "onnxruntime-genai", "run_genai.py", 2.5, "peers-genai.txt", notes=("Decoded with its own generator.",)
    ),
    "torch": Contestant(
        "torch.onnx.export",
        "run_torch_export.py",
        3,
        notes=("Cache as inputs and outputs through a wrapper of 10 lines.",),
    ),
    REFERENCE: Contestant("transformers, eager", "run_transformers.py", 2, exports=False),
}


@dataclass(frozen=True)
class Settings:
    """Settings that all contestants get alike.

    `repeats` timed runs of `steps` greedy tokens in each round, behind `context` tokens.
    """

    rounds: int = 3
    context: int = 64
    steps: int = 32
    repeats: int = 2
    threads: int = 1
    seed: int = 0


@dataclass
class Record:
    """The record of one contestant, filled round by round.

    `reason` says why it stopped taking part.
    """

    exports: list[dict[str, float]] = field(default_factory=list)
    decodes: list[dict[str, Any]] = field(default_factory=list)
    logits: np.ndarray | None = None
    versions: dict[str, str] = field(default_factory=dict)
    reason: str | None = None


def run(work: Path, shape: str, settings: Settings, names: tuple[str, ...] = tuple(CONTESTANTS)) -> dict[str, Any]:
    """Measure the contestants `names`.

    A peer that fails or lacks memory is recorded with the reason. Raises CheckError when this project does.
    """
    if unknown := sorted(set(names) - set(CONTESTANTS)):
        raise InputError(f"expected contestants among {', '.join(CONTESTANTS)}, found {', '.join(unknown)}")
    work = Path(work).resolve()
    for folder in ("jobs", "out"):
        (work / folder).mkdir(parents=True, exist_ok=True)
    checkpoint = make_checkpoint(work, shape)
    pythons = {name: environment_python(work, CONTESTANTS[name].pins) for name in names}
    records, loads = {name: Record() for name in names}, []
    for number in range(settings.rounds):
        for step in (_export, _decode):
            for name in names:
                if records[name].reason is None and (step is _decode or CONTESTANTS[name].exports):
                    _read_through(checkpoint)
                    loads.append(os.getloadavg()[0])
                    step(name, records[name], work, checkpoint, pythons[name], settings)
                if name == OURS and records[name].reason:
                    raise CheckError(
                        f"{OURS}: expected an exported model that decodes, found "
                        f"{records[name].reason}; its log is in {work / 'jobs'}"
                    )
        done = replace(settings, rounds=number + 1)
        # what an interrupted run leaves
        write_json(work / "record.json", _summary(shape, checkpoint, done, records, loads))
    return read_json(work / "record.json")


def _summary(
    shape: str, checkpoint: Path, settings: Settings, records: Mapping[str, Record], loads: list[float]
) -> dict[str, Any]:
    return {
        "benchmark": "peers", "command": _command(shape, settings, tuple(records)),
        "shape": Path(shape).name.removesuffix(".json"), "precision": "fp32", "checkpoint_bytes": _bytes(checkpoint),
        "context": settings.context, "steps": settings.steps, "rounds": settings.rounds, "repeats": settings.repeats,
        "load_average": spread(loads, 1), "contestants": {name: _of_contestant(name, records) for name in records},
        **_relative(records), **surroundings("onnxruntime", "torch", "transformers", threads=settings.threads),
    }  # fmt: skip


def _command(shape: str, settings: Settings, names: tuple[str, ...]) -> str:
    given = {"shape": Path(shape).name, **{key: value for key, value in vars(settings).items() if key != "seed"}}
    only = "" if names == tuple(CONTESTANTS) else "".join(f" --only {name}" for name in names)
    return (
        ("python -m benchmarks peers --work FOLDER")
        + "".join(f" --{key} {value}" for key, value in given.items())
        + only
    )


def make_checkpoint(work: Path, shape: str) -> Path:
    """Make the random checkpoint of `shape` in another process.

    One made before is used again.
    """
    config = Path(shape) if shape.endswith(".json") else SHAPES / f"{shape}.json"
    if not config.is_file():
        raise InputError(
            f"{config}: expected a model's config.json, found none; the shapes are {', '.join(shape_names())}"
        )
    folder = work / "checkpoint"
    made = folder / "config.json"
    if made.is_file() and json.loads(made.read_text()) == json.loads(config.read_text()):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    code = "import lockstep, sys; lockstep.make_random_checkpoint(sys.argv[1], 0, sys.argv[2])"
    usage = run_child(
        [sys.executable, "-c", code, str(config), str(folder)], work / "jobs" / "checkpoint.log", LIMIT, _paths()
    )
    if usage.reason:
        raise CheckError(f"{folder}: expected a random checkpoint, found {usage.reason}")
    return folder


def environment_python(work: Path, pins: str | None) -> str:
    """Return the interpreter that has `pins`.

    Ours, or one of an environment made now or before (its stamp holds the digest of the pins).
    """
    if pins is None:
        return sys.executable
    file, folder = REPOSITORY / "envs" / pins, work / "envs" / Path(pins).stem
    if not file.is_file():
        raise InputError(
            f"{file}: expected the pins of a contestant's environment, found none; run this "
            f"from a checkout of the repository"
        )
    python, stamp, digest = folder / "bin" / "python", folder / "pins.sha256", sha256_file(file)
    if stamp.is_file() and stamp.read_text() == digest:
        return str(python)
    # first, so that any build of it that an index has is taken
    torch = [line for line in file.read_text().splitlines() if line.startswith("torch==")]
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", *torch, "-r", str(file)],
    ):
        usage = run_child(command, work / "jobs" / f"{folder.name}.log", _ENVIRONMENT_LIMIT, _BUILD)
        if usage.reason:
            raise CheckError(f"{file}: expected an environment with these packages, found {usage.reason}")
    stamp.write_text(digest)
    return str(python)


def _export(name: str, record: Record, work: Path, checkpoint: Path, python: str, settings: Settings) -> None:
    out = work / "out" / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    usage, result = _job("export", name, record, work, checkpoint, python, settings)
    if record.reason is None:
        record.versions |= result["versions"]
        files = [path for path in out.rglob("*") if path.is_file() and not path.is_symlink()]
        written = sum(path.stat().st_size for path in files)
        record.exports.append(
            {
                "seconds": usage.seconds,
                "cpu_seconds": usage.cpu_seconds,
                "peak_memory_mb": usage.peak_mb,
                "bytes": written,
            }
        )


def _decode(name: str, record: Record, work: Path, checkpoint: Path, python: str, settings: Settings) -> None:
    usage, result = _job("decode", name, record, work, checkpoint, python, settings)
    if record.reason is None:
        record.versions |= result.pop("versions")
        record.logits = np.load(_result(work, "decode", name).with_suffix(".npy"))
        record.decodes.append(result | {"peak_memory_mb": usage.peak_mb})


def _job(
    what: str, name: str, record: Record, work: Path, checkpoint: Path, python: str, settings: Settings
) -> tuple[Usage | None, dict]:
    """Run the contestant's script.

    Puts the reason into the record where there is no result.
    """
    contestant, result = CONTESTANTS[name], _result(work, what, name)
    needed, free = contestant.memory * _bytes(checkpoint) + _BASE, available_memory()
    if name != OURS and free < needed:
        record.reason = f"skipped: {needed / 1e9:.0f} GB of free memory wanted, {free / 1e9:.0f} GB found"
        return None, {}
    job = {"checkpoint": str(checkpoint), "out": str(work / "out" / name), "result": str(result), **vars(settings)}
    result.unlink(missing_ok=True)
    environment = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(settings.threads),
        **(_paths() if contestant.pins is None else {}),
    }
    usage = run_child(
        [python, str(_RUNNERS / contestant.script), what, json.dumps(job)],
        result.with_suffix(".log"),
        LIMIT,
        environment,
    )
    if usage.reason:
        record.reason = f"{what}: {usage.reason}".replace(str(work), ".")
        return usage, {}
    return usage, json.loads(result.read_text())


def _result(work: Path, what: str, name: str) -> Path:
    return work / "jobs" / f"{what}-{name}.json"


def _paths() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(lockstep.__file__).resolve().parents[1])}


def _bytes(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))


def _read_through(checkpoint: Path) -> None:
    """Bring the weights into the page cache.

    So no contestant waits for the disk in another's stead.
    """
    for path in sorted(checkpoint.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def _of_contestant(name: str, records: Mapping[str, Record]) -> dict[str, Any]:
    record, contestant = records[name], CONTESTANTS[name]
    summary: dict[str, Any] = {"label": contestant.label, "versions": record.versions, "notes": list(contestant.notes)}
    if record.reason:
        summary["reason"] = record.reason
    if record.exports:
        columns = {key: [sample[key] for sample in record.exports] for key in record.exports[0]}
        written = columns.pop("bytes")
        summary["export"] = {key: spread(values, 2) for key, values in columns.items()} | {
            "bytes_written": int(max(written))
        }
    if record.decodes:
        rates = [1 / seconds for sample in record.decodes for seconds in sample["seconds_per_step"]]
        summary["decode"] = {
            "tokens_per_second": spread(rates, 2),
            "open_seconds": spread([sample["open_seconds"] for sample in record.decodes], 2),
            "peak_memory_mb": spread([sample["peak_memory_mb"] for sample in record.decodes], 0),
        }
        reference = records.get(REFERENCE)
        if name != REFERENCE and reference and reference.decodes:
            summary["decode"] |= {
                "largest_logit_difference": float(np.abs(record.logits - reference.logits).max()),
                "tokens_equal": record.decodes[-1]["tokens"] == reference.decodes[-1]["tokens"],
            }
    return summary


def _relative(records: Mapping[str, Record]) -> dict[str, Any]:
    """Return how many times as fast (or as small) ours is as each other contestant.

    Round by round; above 1, ours is better.
    """
    if OURS not in records:
        return {}

    def compare(part: str, value) -> dict[str, Any]:
        series = {name: [value(sample) for sample in getattr(record, part)] for name, record in records.items()}
        complete = {name: values for name, values in series.items() if values and len(values) == len(series[OURS])}
        return ratios(complete, OURS)

    return {
        "lockstep_relative_to": {
            "seconds": compare("exports", lambda sample: sample["seconds"]),
            "cpu_seconds": compare("exports", lambda sample: sample["cpu_seconds"]),
            "peak_memory": compare("exports", lambda sample: sample["peak_memory_mb"]),
            "decode": compare("decodes", lambda sample: float(np.median(sample["seconds_per_step"]))),
        }
    }
