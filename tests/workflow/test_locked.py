"""Runs with a lock: only locked results, and the first difference is named."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from checkout import Checkout
from test_locks import flip

from lockstep.artifacts.files import read_json, write_json
from lockstep.artifacts.statement import Statement
from some import some_cases

MODEL = "demo-llama"
LOCKED = ("--config", "locked=true")
LOCK = f"locks/{MODEL}.lock.json"


def job(stage: str) -> tuple[str, ...]:
    """A stage of all layers in fp32, held to the lock."""
    return ("stage_job", stage, f"{MODEL}/fp32", "config/config.yaml", "results", LOCK)


@pytest.fixture(scope="module")
def once(finished: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    checkout = finished.copy(tmp_path_factory.mktemp("locked") / "checkout")
    checkout.call("lockstep", "lock")
    return checkout


@pytest.fixture
def locked(once: Checkout, tmp_path: Path) -> Checkout:
    """The finished run with its lock."""
    return once.copy(tmp_path / "checkout")


def edit_lock(checkout: Checkout, change: Callable[[dict], None]) -> None:
    path = checkout.folder / "locks" / f"{MODEL}.lock.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def refused(checkout: Checkout, *arguments: str) -> str:
    process = checkout.call(*arguments, check=False)
    assert process.returncode in (1, 2) and "Traceback" not in process.stderr
    (line,) = [line for line in process.stderr.splitlines() if line.startswith("lockstep: error: ")]
    return line.removeprefix("lockstep: error: ")


def test_what_is_locked_is_left_alone(locked: Checkout) -> None:
    assert not locked.would_run(*LOCKED)
    assert not locked.would_run("--config", "locked=false")
    assert "expected true or false" in refused(locked, "snakemake", "--dry-run", "--config", "locked=maybe")


def edit_prompt(checkout: Checkout) -> None:
    checkout.edit_config(lambda config: config["models"][MODEL]["golden"]["prompts"].append({"text": "Dark"}))


BEFORE = {
    "a weight": (
        lambda demo: flip(demo.folder / "resources" / MODEL / "model.safetensors", -100),
        r"resolve: model\.safetensors differs: \w{12} -> \w{12}",
    ),
    "a prompt": (edit_prompt, rf"reference {MODEL}/2: golden\.prompts\.004 differs: new, Dark; locked by"),
    "a layer count": (
        lambda demo: demo.edit_config(lambda config: config["models"][MODEL]["layers"].append(3)),
        rf"validate {MODEL}/fp32/3: the parameters of this check are not in the lock",
    ),
    "a tolerance": (
        lambda demo: demo.edit_config(lambda config: config.setdefault("tolerances", {}).update(fp32={"noise": 1e9})),
        r"\w+ \S+: tolerance\S* differs: \S+ -> \d+00000000\.0; locked "
        r"by locks/demo-llama\.lock\.json: undo the change",
    ),
    "a length": (
        lambda demo: demo.edit_config(lambda config: config["models"][MODEL]["golden"].update(max_new_tokens=4)),
        rf"reference {MODEL}/2: golden\.(max_new_tokens differs: 16 -> 4|long_prompt differs: 240 "
        rf"-> 252); locked by",
    ),
    "an expected text": (
        lambda demo: demo.edit_config(
            lambda config: config["models"][MODEL]["golden"]["prompts"][0]["expected"].update({2: "x"})
        ),
        rf"golden {MODEL}/fp32/2/onnxruntime: expected\.000 differs: cars on fog .* -> x; locked by",
    ),
    "a limit": (
        lambda demo: demo.edit_config(lambda config: config["limits"].update(max_batch_size=1)),
        r"\w+ \S+: engine_limits\.max_batch_size differs: 4 -> 1; locked by",
    ),
    "no lock": (
        lambda demo: (demo.folder / "locks" / f"{MODEL}.lock.json").unlink(),
        r"locked: expected demo-llama\.lock\.json in locks or \S+/locks, found none; write it with `lockstep lock`",
    ),
}


@pytest.mark.parametrize("edit, message", some_cases(BEFORE, "a weight", "no lock"))
def test_a_change_is_refused_before_any_job(locked: Checkout, edit: Callable[[Checkout], None], message: str) -> None:
    before = locked.digests()
    edit(locked)
    assert re.match(message, refused(locked, "snakemake", "--cores", "1", *LOCKED))
    assert locked.digests() == before


@pytest.mark.long
def test_code_that_makes_the_same_bytes_passes(locked: Checkout) -> None:
    """It makes them again, which the lock allows, and `explain` tells it."""
    before = locked.digests()
    locked.append("src/lockstep/backends/onnxruntime/backend.py", "EDITED = 1\n")
    explained = locked.call("lockstep", "explain", f"{MODEL}/fp32/2").stdout
    assert "code lockstep/backends/onnxruntime " in explained
    jobs = locked.would_run(*LOCKED)
    assert jobs["build"] == 1 and not jobs["export"]
    locked.finish(f"results/{MODEL}/fp32/golden/onnxruntime/2.json", *LOCKED)
    after = locked.digests()
    statements = re.compile(r"\.statement\.json$|summary|report")
    assert {name: digest for name, digest in after.items() if not statements.search(name)} == {
        name: digest for name, digest in before.items() if not statements.search(name)
    }
    locked.call("lockstep", "verify")


def test_code_that_makes_other_bytes_is_refused_with_its_makers(locked: Checkout) -> None:
    module = locked.folder / "src/lockstep/backends/onnxruntime/backend.py"
    text = module.read_text()
    assert text.count("ORT_ENABLE_ALL") == 1
    module.write_text(text.replace("ORT_ENABLE_ALL", "ORT_ENABLE_BASIC"))
    shutil.rmtree(locked.results / MODEL / "fp32/engines/onnxruntime")  # engines that still fit would be kept
    line = refused(locked, *job("build"))
    assert re.match(
        r"build: \S+\.onnx differs: \w{12} -> \w{12}, made with .*code \w{12} -> \w{12}; locked by locks/", line
    )
    assert not (locked.results / MODEL / "fp32/engines/onnxruntime/engines.json").exists()


def test_a_graph_that_differs_is_refused_before_its_manifest(locked: Checkout) -> None:
    path = locked.folder / "locks" / f"{MODEL}.lock.json"
    lock = json.loads(path.read_text())
    graphs = lock["locked"]["graphs/fp32"]
    export = lock["made with"]["export"]
    graphs["attention.decode.onnx"] = graphs["assembly.json"] = export["code"] = "0" * 64
    path.write_text(json.dumps(lock))
    differs = r"export: attention\.decode\.onnx differs: 000000000000 -> \w{12}"
    line = refused(locked, *job("build"))
    assert re.match(rf"{differs}, made with code 000000000000 -> \w{{12}}; locked by", line)


def test_a_job_is_refused_before_it_works(locked: Checkout) -> None:
    before = locked.digests()
    edit, message = BEFORE["a tolerance"]
    edit(locked)
    assert re.match(message, refused(locked, *job("validate")))
    assert locked.digests() == before


def test_what_comes_out_otherwise_is_taken_away(locked: Checkout) -> None:
    edit_lock(locked, lambda lock: lock["locked"]["weights/fp32"].update({"weights.safetensors": "0" * 64}))
    assert re.match(
        r"convert: weights\.safetensors differs: 000000000000 -> \w{12}; locked by", refused(locked, *job("convert"))
    )
    assert not (locked.results / MODEL / "fp32" / "weights.json").exists()
    process = locked.snakemake("--cores", "1", f"results/{MODEL}/fp32/weights.json", *LOCKED, check=False)
    assert process.returncode == 1
    assert ("convert: weights.safetensors differs: 000000000000 -> ") in process.stdout + process.stderr
    assert not (locked.results / MODEL / "fp32" / "weights.json").exists()


def test_an_engine_set_that_is_refused_takes_its_statement_with_it(locked: Checkout) -> None:
    edit_lock(
        locked,
        lambda lock: [
            device.update({"middle.onnx": "0" * 64})
            for name, device in lock["locked"].items()
            if name.startswith("engines/fp32/onnxruntime/")
        ],
    )
    assert re.match(r"build: middle\.onnx differs: 000000000000 -> \w{12}; locked by", refused(locked, *job("build")))
    assert not list((locked.results / MODEL / "fp32" / "engines" / "onnxruntime").glob("*.json"))


@pytest.mark.long
def test_engines_of_the_cache_that_are_not_the_locked_ones_are_built_instead(
    locked: Checkout, filled_cache: Path, tmp_path: Path
) -> None:
    """A cache of others whose engines have other bytes; then a lock that the engines built here do not match either."""
    cache = tmp_path / "cache"
    shutil.copytree(filled_cache, cache)
    engines = locked.results / MODEL / "fp32" / "engines" / "onnxruntime"
    before = locked.digests()
    entry = cache / "entries" / f"{Statement.load(engines / 'engines.statement.json').key.sha256}.json"
    replace_engine(cache, entry)
    locked.edit_config(lambda config: config.update(cache=str(cache)))

    def build(**options: bool) -> str:
        shutil.rmtree(engines)
        return locked.call(*job("build"), **options).stderr

    line = f"cache: build {MODEL}/fp32/onnxruntime is taken from {cache}"
    output = build()
    assert line in output and re.search(
        r"cache: build: middle\.onnx differs: \w{12} -> \w{12} in the cached artefact, .* is made again", output
    )
    assert locked.digests() == before
    locked.call("lockstep", "verify")
    output = build()
    assert line in output and "differs" not in output, (
        "the built files are in the cache, instead of those that are not locked"
    )
    assert locked.digests() == before

    replace_engine(cache, entry)
    data = entry.read_bytes()
    edit_lock(
        locked,
        lambda lock: [
            device.update({"middle.onnx": "0" * 64})
            for name, device in lock["locked"].items()
            if name.startswith("engines/fp32/onnxruntime/")
        ],
    )
    assert "lockstep: error: build: middle.onnx differs: 000000000000 -> " in build(check=False)
    assert not list(engines.glob("*.json")) and entry.read_bytes() == data


def replace_engine(cache: Path, entry: Path) -> None:
    """Another engine under the same build key: whole, and not the one that was locked."""

    def put(data: bytes) -> str:
        sha256 = hashlib.sha256(data).hexdigest()
        (cache / "blobs" / sha256).write_bytes(data)
        return sha256

    statement = Statement.load(entry)
    outputs = dict(statement.outputs)
    model = onnx.load(cache / "blobs" / outputs["middle.onnx"])
    model.doc_string = "built elsewhere"
    outputs["middle.onnx"] = put(model.SerializeToString(deterministic=True))
    engines = read_json(cache / "blobs" / outputs["engines.json"])
    middle = next(engine for engine in engines["engines"].values() if engine["file"] == "middle.onnx")
    middle["sha256"] = outputs["middle.onnx"]
    write_json(cache / "engines.json", engines)
    outputs["engines.json"] = put((cache / "engines.json").read_bytes())
    (cache / "engines.json").unlink()
    replace(statement, outputs=outputs).save(entry)


def test_engines_of_a_device_that_is_not_locked_are_refused_by_a_run_and_by_verify(locked: Checkout) -> None:
    """And the advice leads out: to a run that is not locked, and a lock."""
    edit_lock(locked, lambda lock: other_device(lock["locked"]))
    for command in (job("build"), ("snakemake", "-n", *LOCKED)):
        line = refused(locked, *command)
        assert re.match(r"build.*, which is not in the lock; |build .*/\w+ is not in the lock; ", line), line
        assert "run without locked and `lockstep lock` again" in line
    process = locked.call("lockstep", "verify", check=False)
    assert process.returncode == 1 and re.search(r"unknown .* engines/fp32/onnxruntime/\w+: not in", process.stdout)
    locked.call("lockstep", "lock")
    lock = json.loads((locked.folder / "locks" / f"{MODEL}.lock.json").read_text())
    assert len([name for name in lock["locked"] if name.startswith("engines/fp32/onnxruntime/")]) == 2
    locked.call(*job("build"))
    locked.call("lockstep", "verify")


def other_device(locked: dict) -> None:
    (place,) = (name for name in locked if name.startswith("engines/fp32/onnxruntime/"))
    locked["engines/fp32/onnxruntime/other 0"] = locked.pop(place)


def test_engines_of_a_cpu_with_other_instruction_sets_are_judged_by_their_bytes(locked: Checkout) -> None:
    """By a run, by verify and by lock. The CPU is this one, as if it had fewer of them."""
    path = locked.folder / "locks" / f"{MODEL}.lock.json"
    engines = locked.results / MODEL / "fp32/engines/onnxruntime/engines.json"
    before = read_json(engines)
    lock = path.read_bytes()
    locked.append("src/lockstep/backends/cpu.py", "_ISA = {name: flags[:3] for name, flags in _ISA.items()}\n")
    locked.run(*job("build"))
    after = read_json(engines)
    assert after["device"]["isa"] != before["device"]["isa"] and after["engines"] == before["engines"]
    locked.run("lockstep", "verify")
    process = locked.run("lockstep", "lock")
    assert not process.stderr and read_json(path)["locked"] == json.loads(lock)["locked"]


def test_what_is_there_and_not_locked_is_refused_before_any_job(locked: Checkout) -> None:
    edit_lock(locked, lambda lock: lock["locked"]["weights/fp32"].update({"weights.safetensors": "0" * 64}))
    before = locked.digests()
    process = locked.snakemake("-n", *LOCKED, check=False)
    line = process.stdout + process.stderr
    assert process.returncode == 1 and "weights.safetensors differs: 000000000000 -> " in line
    assert "--forcerun convert" in line and locked.digests() == before


def test_what_was_made_from_something_else_is_not_read(locked: Checkout) -> None:
    edit_lock(locked, lambda lock: lock["locked"]["graphs/fp32"].update({"middle.onnx": "0" * 64}))
    assert re.match(r"export: middle\.onnx differs: 000000000000 -> \w{12}", refused(locked, *job("build")))
