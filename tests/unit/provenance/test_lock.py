"""Statements, locks, differences: on results of the demo that the stages made in this process."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from demo_model import CONFIG, DEMO
from reports import golden

from lockstep import weights
from lockstep.artifacts.files import read_json, write_json
from lockstep.artifacts.reports import GoldenReport
from lockstep.artifacts.statement import BuildKey, statement_path
from lockstep.backends import builder, identity
from lockstep.checkpoint import resolve
from lockstep.errors import CheckError, InputError
from lockstep.manifests.manifest_files import content, failed_path
from lockstep.provenance import code_identity, explain, lock
from lockstep.provenance import run as stage
from lockstep.provenance.lock import Lock, is_absent
from lockstep.provenance.lock_update import is_looser
from lockstep.provenance.statements import build_key, read_statement
from lockstep.provenance.verify import verify
from lockstep.stages import STAGES, Job, jobs
from lockstep.targets import Results, Target
from lockstep.verify.metrics import finish

NAMES = {"model": "demo-llama", "precision": "fp16", "layers": "all", "backend": "onnxruntime"}


@pytest.fixture(scope="module")
def built(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Checkpoint, weights and engines of the demo in fp16, with statements; the graphs are those of `demo`."""
    results = Results(tmp_path_factory.mktemp("built") / "results")
    shutil.copytree(demo.assembly("demo-llama", "fp16").parent, results.assembly("demo-llama", "fp16").parent)
    run(results, "resolve", lambda: resolve("resources/demo-llama", DEMO, results.checkpoint("demo-llama")))
    run(results, "export", lambda: None)
    run(
        results,
        "convert",
        lambda: weights.convert(results.checkpoint("demo-llama"), "fp16", results.weights("demo-llama", "fp16")),
    )
    run(
        results,
        "build",
        lambda: builder.build(
            results.assembly("demo-llama", "fp16"), "onnxruntime", results.engines("demo-llama", "fp16", "onnxruntime")
        ),
    )
    return results


@pytest.fixture
def copy(built: Results, tmp_path: Path) -> Results:
    shutil.copytree(built.root, tmp_path / "results")
    results = Results(tmp_path / "results")
    for name in ("checkpoint", "weights"):  # they point to the checkpoint from where they lie
        path = results.checkpoint("demo-llama") if name == "checkpoint" else results.weights("demo-llama", "fp16")
        run(
            results,
            "resolve" if name == "checkpoint" else "convert",
            lambda: (
                resolve("resources/demo-llama", DEMO, path)
                if name == "checkpoint"
                else weights.convert(results.checkpoint("demo-llama"), "fp16", path)
            ),
        )
    return results


def run(results: Results, name: str, make) -> None:
    # The manifest of the graphs is read from architecture.json, which this tree has not: its statement is made without
    # inputs.
    job = STAGES[name].job(CONFIG, results.root, NAMES)
    stage.run(job if name != "export" else type(job)(job.stage, job.names, {}, {}, job.output), make)


def test_a_statement_says_what_an_engine_set_was_made_of(built: Results) -> None:
    statement = read_statement(built.engines("demo-llama", "fp16", "onnxruntime"))
    key = statement.key
    assert key.inputs == {"assembly": content(built.assembly("demo-llama", "fp16"))}
    assert "lockstep/backends/onnxruntime" in key.code and "lockstep/export" not in key.code
    assert key.environment["onnxruntime"] == key.backend["version"] == code_identity.read_pins()["onnxruntime"]
    assert key.backend["device"]["architecture"]
    assert set(statement.outputs) == {
        path.name for path in built.engines("demo-llama", "fp16", "onnxruntime").parent.iterdir()
    } - {"engines.statement.json"}
    assert str(built.root.parent) not in json.dumps(statement.to_json())


def test_a_statement_lists_no_file_of_another_folder(built: Results, copy: Results) -> None:
    """Weights in the checkpoint's own precision stay where they are, which may be elsewhere on another machine."""
    statements = [read_statement(results.weights("demo-llama", "fp16")) for results in (built, copy)]
    assert set(statements[0].outputs) == {"weights.json"}
    assert "model.safetensors" not in json.dumps([statement.outputs for statement in statements])


def test_weights_are_no_part_of_an_engines_key(built: Results) -> None:
    for job in jobs(CONFIG, built.root, [Target("demo-llama", "fp16", "all", "onnxruntime")]):
        if job.stage in ("export", "build"):
            assert not {"checkpoint", "weights"} & set(job.inputs)


def test_a_key_does_not_hang_on_places(built: Results, copy: Results, tmp_path: Path) -> None:
    """The same checkpoint elsewhere: other paths in the manifests, the same keys."""
    other = Results(tmp_path / "deeper" / "results")
    folder = shutil.copytree(DEMO, tmp_path / "deeper" / "checkpoint")
    run(other, "resolve", lambda: resolve(str(folder), folder, other.checkpoint("demo-llama")))
    graphs = other.assembly("demo-llama", "fp16").parent
    shutil.copytree(built.assembly("demo-llama", "fp16").parent, graphs)
    run(
        other,
        "convert",
        lambda: weights.convert(other.checkpoint("demo-llama"), "fp16", other.weights("demo-llama", "fp16")),
    )
    for name in ("convert", "validate"):
        keys = [
            build_key(STAGES[name].job(CONFIG, results.root, NAMES)).inputs.get("checkpoint")
            for results in (built, copy)
        ]
        assert keys[0] == keys[1]
    assert content(other.weights("demo-llama", "fp16")) == content(built.weights("demo-llama", "fp16"))


def test_explain_says_what_it_can_where_the_backend_cannot_be_asked(
    built: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine without a GPU."""
    job = STAGES["build"].job(CONFIG, built.root, NAMES)
    expected = explain.explain_job(job, {}, None)

    def without_gpu(name: str, runs: bool = True) -> None:
        raise InputError(f"backend {name}: expected an NVIDIA GPU with its driver, found none")

    monkeypatch.setattr(identity, "identity", without_gpu)
    assert explain.explain_job(job, {}, None) == expected


def test_an_untouched_tree_is_the_same(copy: Results) -> None:
    assert {finding.status for finding in verify(copy.root)} == {"same"}


FILES = (
    "demo-llama/checkpoint.json", "demo-llama/fp16/weights.json", "demo-llama/fp16/graphs/assembly.json",
    "demo-llama/fp16/graphs/middle.onnx", "demo-llama/fp16/graphs/tokenizer.json",
    "demo-llama/fp16/engines/onnxruntime/engines.json", "demo-llama/fp16/engines/onnxruntime/middle.onnx",
    "demo-llama/fp16/engines/onnxruntime/engines.statement.json",
)  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_named(copy: Results, name: str) -> None:
    path = copy.root / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    wrong = [finding for finding in verify(copy.root) if finding.status != "same"]
    assert ("different", name) in [(finding.status, finding.name) for finding in wrong]
    assert all(finding.name == name or finding.status == "unknown" for finding in wrong), (
        "the files of a damaged statement are not known"
    )


def test_a_lost_file_is_missing_and_a_foreign_one_unknown(copy: Results) -> None:
    engines = copy.engines("demo-llama", "fp16", "onnxruntime").parent
    (engines / "middle.onnx").unlink()
    (engines / "foreign.onnx").write_bytes(b"x")
    wrong = {finding.name: finding.status for finding in verify(copy.root) if finding.status != "same"}
    assert wrong == {
        "demo-llama/fp16/engines/onnxruntime/middle.onnx": "missing",
        "demo-llama/fp16/engines/onnxruntime/foreign.onnx": "unknown",
    }


def test_another_manifest_behind_the_statements_back(copy: Results) -> None:
    path = copy.engines("demo-llama", "fp16", "onnxruntime")
    write_json(path, {**read_json(path), "backend_version": "0.0"})
    assert read_statement(path) is None
    assert "different" in {finding.status for finding in verify(copy.root)}


def test_a_statement_that_was_edited_is_refused(copy: Results) -> None:
    path = statement_path(copy.engines("demo-llama", "fp16", "onnxruntime"))
    path.write_text(path.read_text().replace("pkg:pypi/onnxruntime@", "pkg:pypi/onnxruntime@9."))
    with pytest.raises(InputError, match="expected the digest of what the statement says"):
        read_statement(copy.engines("demo-llama", "fp16", "onnxruntime"))


ENDED = """
import pathlib, sys, time
from lockstep.errors import guard
from lockstep.artifacts.files import write_json
from lockstep.provenance import run as stage
from lockstep.stages import Job
out = pathlib.Path(sys.argv[1])
def make():
    write_json(out, {"made": 2})
    print("made", flush=True)
    for _ in range(600):  # a signal just before a sleep begins is seen when it ends
        time.sleep(0.1)
with guard():
    stage.run(Job("config", {}, {}, {}, out), make)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_stage_that_is_ended_before_its_statement_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ENDED, str(tmp_path / "config.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "made\n"
    process.send_signal(number)
    assert process.communicate()[1].count("\n") == 1 and process.returncode == 128 + number
    assert not list(tmp_path.iterdir())


def test_a_manifest_without_its_statement_is_not_read(copy: Results) -> None:
    """As `kill -9` between the two leaves it: nothing says that it is whole, and of what."""
    statement_path(copy.assembly("demo-llama", "fp16")).unlink()
    job = STAGES["build"].job(CONFIG, copy.root, NAMES)
    before = read_json(job.output)
    with pytest.raises(
        InputError,
        match=r"assembly.json: expected its statement assembly.statement.json in .*, found none: .*; make it",
    ):
        stage.run(job, lambda: pytest.fail("it was read"))
    assert read_json(job.output) == before and read_statement(job.output)


TARGET = Target("demo-llama", "fp16", "all", "onnxruntime")


def failing(results: Results, error: BaseException) -> dict | None:
    """Run a golden check that passes, then one that raises `error`; return the report of the failed check."""
    out = results.golden("demo-llama", "fp16", "all", "onnxruntime")
    job = Job("golden", {**NAMES}, {}, {}, out)
    stage.run(job, lambda: golden(TARGET).save(out))
    with pytest.raises(type(error)):
        stage.run(job, lambda: (_ for _ in ()).throw(error))
    assert read_statement(out), "the earlier result stays"
    return read_json(failed_path(out)) if failed_path(out).exists() else None


@pytest.mark.parametrize("error, reason", [
    (InputError("reference.json: expected\n 2 layers"), "reference.json: expected 2 layers"),
    (RuntimeError("planted"), "RuntimeError: planted"),
    (SystemExit(2), "golden ended with exit code 2; its log says why"),
    (SystemExit(143), None), (KeyboardInterrupt(), None),
])  # fmt: skip
def test_a_check_that_fails_before_it_has_a_report_leaves_the_reason(
    tmp_path: Path, error: BaseException, reason: str | None
) -> None:
    reason_left = failing(Results(tmp_path), error)
    assert (reason_left and reason_left["failure"]) == reason


def test_a_check_leaves_its_own_report_where_it_has_one(tmp_path: Path) -> None:
    out = tmp_path / "all.json"
    with pytest.raises(CheckError, match="off; details in"):
        stage.run(Job("golden", {**NAMES}, {}, {}, out), lambda: finish(out, golden(TARGET), "off"))
    report = GoldenReport.load(failed_path(out))
    assert (report.result, report.failure) == ("fail", "off") and not out.exists()


def test_engines_without_a_statement_are_not_gone_on_with(copy: Results) -> None:
    job = STAGES["build"].job(CONFIG, copy.root, NAMES)
    statement_path(job.output).unlink()
    stage.run(job, lambda: [pytest.fail("they were there") if job.output.exists() else STAGES["build"].run(job)])
    assert {finding.status for finding in verify(copy.root)} == {"same"}


def test_verify_needs_the_standard_library_only() -> None:
    code = (
        "import lockstep.provenance.verify, sys; print(*sorted({name.partition('.')[0] for name in "
        "sys.modules} - set(sys.stdlib_module_names)))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not set(loaded) & {
        "numpy", "onnx", "onnxruntime", "torch", "transformers", "pydantic", "yaml", "click", "ml_dtypes",
    }  # fmt: skip


def test_a_difference_is_in_words_with_both_values() -> None:
    document = {"a": {"x": "1", "gone": 2}, "digest": "ab" * 32, "list": [1, 2]}
    other = {"a": {"x": "2", "new": True}, "digest": "cd" * 32, "list": [1, 3]}
    assert [f"{'.'.join(where)}: {change}" for where, change in lock.changes(document, other)] == [
        "a.gone: gone, was 2",
        "a.new: new, True",
        "a.x: 1 -> 2",
        "digest: abababababab -> cdcdcdcdcdcd",
        "list: 1 2 -> 1 3",
    ]


def test_what_is_no_lock_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.lock.json").write_text("{}")
    with pytest.raises(InputError, match="expected format 'lockstep.lock/5'"):
        Lock.load(tmp_path / "a.lock.json")
    with pytest.raises(InputError, match="expected a file, found none; write one with"):
        Lock.load(tmp_path / "b")
    (tmp_path / "my.yaml").write_text("models: {}")  # not to be deleted
    with pytest.raises(InputError, match="my.yaml: expected JSON, found .*; take the lock as it was committed"):
        Lock.load(tmp_path / "my.yaml")


def test_a_lock_is_written_as_it_was_read(tmp_path: Path) -> None:
    path = DEMO.parents[1] / "locks" / "demo-llama.lock.json"
    lock = Lock.load(path)
    lock.save(tmp_path / "lock.json")
    assert (tmp_path / "lock.json").read_bytes() == path.read_bytes()
    assert len(lock.entries) > 50


def with_instruction_sets(key: BuildKey, *isa: str) -> BuildKey:
    """The key of engines that are built on a CPU with these instruction sets."""
    device = {**key.backend["device"], "isa": list(isa)}
    return dataclasses.replace(key, backend={**key.backend, "device": device})


def test_engines_of_the_cpu_have_one_place_whatever_its_instruction_sets(built: Results) -> None:
    """Their bytes are held by test_same_bytes.py, and by the runs of CI on other CPUs."""
    manifest = built.engines("demo-llama", "fp16", "onnxruntime")
    key = read_statement(manifest).key
    for other in (key, with_instruction_sets(key, "avx2"), with_instruction_sets(key, "avx2", "avx512f")):
        where, _ = STAGES["build"].pin(manifest, other)
        assert where == ("engines", "fp16", "onnxruntime", key.backend["device"]["architecture"])


def test_engines_of_a_backend_that_is_not_portable_have_a_place_for_each_device(built: Results) -> None:
    manifest = built.engines("demo-llama", "fp16", "onnxruntime")
    key = read_statement(manifest).key
    key = dataclasses.replace(key, backend={**key.backend, "portable": False})
    places = {STAGES["build"].pin(manifest, with_instruction_sets(key, *isa))[0] for isa in ((), ("avx2",))}
    assert len(places) == 2


@pytest.mark.parametrize("where, before, after, expected", [
    ("tolerance", 0.001, 0.0025, True), ("tolerance", 0.0025, 0.001, False), ("tolerance.noise", 6, 6.5, True),
    ("tolerance.block", None, lock.ABSENT, False), ("tolerance.block", 0.1, lock.ABSENT, True),
    ("tolerance.a", lock.ABSENT, 1, False),
    ("limits.max_batch_size", 4, 1, True), ("limits.max_batch_size", 4, 8, False), ("seconds", 30, 20, True),
    ("golden.max_new_tokens", 16, 4, True), ("golden.long_prompt", 240, 252, False), ("max_seq_len", 256, None, True),
    ("golden.prompts.003", "Dark", lock.ABSENT, True), ("golden.prompts.003", lock.ABSENT, "Dark", False),
    ("golden.prompts.003", "Dark", "Light", False), ("expected.000", "a text", None, True),
    ("expected.000", None, "a text", False), ("expected.000", "a text", "another", False),
    ("perplexity_text", "It", "", True), ("seed", 7, 3, False),
])  # fmt: skip
def test_a_check_is_looser_where_it_lets_pass_what_did_not(where: str, before, after, expected: bool) -> None:
    assert is_looser(tuple(where.split(".")), before, after) is expected


def test_what_is_not_run_on_a_machine_is_not_missing_there() -> None:
    """As where the CPU has no bf16, and there is no GPU: engines for GPUs are built nevertheless."""
    not_run = {"cuda": "needs an NVIDIA GPU", "bf16/openvino": "needs bf16 in the CPU"}
    places = (
        "engines/bf16/openvino/x86_64", "golden/bf16/openvino/2", "checks/served/bf16/all/openvino",
        "checks/compare/fp16/cuda", "golden/fp16/cuda/2", "adapted/cuda/2/fp16",
    )  # fmt: skip
    other_places = (
        "engines/fp16/cuda/NVIDIA GPUs", "engines/w4a16/openvino/x86_64", "checks/validate/bf16/2", "graphs/bf16",
        "weights/bf16", "reference/2", "golden/w4a16/openvino/2",
    )  # fmt: skip
    assert all(is_absent(place, not_run) for place in places)
    assert not any(is_absent(place, not_run) for place in other_places)
