"""Folders where files are to be written and files where folders are to be made: one line, before any work, and nothing
is touched."""

from __future__ import annotations

import os

import pytest
from checkpoints import error_of, write
from click.testing import CliRunner
from demo_model import DEMO

from calls import call
from lockstep.artifacts.files import write_bytes, write_json
from lockstep.backends.cpu import THREADS_VARIABLE, core_count, thread_count
from lockstep.checkpoint import resolve
from lockstep.cli.main import main
from lockstep.export.run import export
from lockstep.weights import convert

CONFIG = f"models: {{m: {{source: {DEMO}, golden: {{prompts: [{{text: Light}}]}}}}}}\n"


def everything(folder) -> list[tuple[str, bytes | None]]:
    return sorted(
        (path.relative_to(folder).as_posix(), path.read_bytes() if path.is_file() else None)
        for path in folder.rglob("*")
    )


@pytest.mark.parametrize(
    "call", [lambda path: write_bytes(path, b"new"), lambda path: write_json(path, {"format": "x"})]
)
def test_a_folder_where_a_file_is_to_be_written(tmp_path, call):
    (tmp_path / "out" / "inside").mkdir(parents=True)
    before = everything(tmp_path)
    assert error_of(call, tmp_path / "out") == (
        f"{tmp_path}/out: expected to write a file here, found a folder; remove or rename it, or choose another place"
    )
    assert everything(tmp_path) == before


def test_a_device_is_left_as_it_is(tmp_path):
    """Renamed over, a root's /dev/null would be a file from then on."""
    place = tmp_path / "null"
    place.symlink_to("/dev/null")
    line = error_of(write_json, place, {})
    assert line == f"{place}: expected to write a file here, found a device; choose another place"
    assert place.is_char_device()


@pytest.mark.parametrize("below", ["out.json", "a/out.json", "a/b/c/out.json"])
def test_a_file_where_a_folder_is_to_be_made(tmp_path, below):
    (tmp_path / "file").write_text("kept")
    line = error_of(write_bytes, tmp_path / "file" / below, b"new")
    assert line == (
        f"{tmp_path}/file: expected a folder to write into, found a file; remove or rename it, or choose another place"
    )
    assert everything(tmp_path) == [("file", b"kept")]


def test_stages_say_so_too(tmp_path):
    folder = write(tmp_path / "checkpoint")
    results = tmp_path / "results"
    (results / "checkpoint.json").mkdir(parents=True)
    assert (f"{results}/checkpoint.json: expected to write a file here, found a folder") in error_of(
        resolve, str(folder), folder, results / "checkpoint.json"
    )
    checkpoint = resolve(str(folder), folder, tmp_path / "c.json")
    (results / "fp32" / "weights.safetensors").mkdir(parents=True)
    assert (f"{results}/fp32/weights.safetensors: expected to write a file here, found a folder") in error_of(
        convert, checkpoint, "fp32", results / "fp32" / "weights.json"
    )
    (tmp_path / "graphs").touch()
    assert f"{tmp_path}/graphs: expected a folder to write into, found a file" in error_of(
        export, resolve(str(DEMO), DEMO, tmp_path / "demo.json"), "fp32", tmp_path / "graphs" / "assembly.json"
    )


@pytest.fixture
def lockstep(tmp_path, monkeypatch):
    """`lockstep` on a command line in an empty folder with a config: its exit code and all that it says."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(CONFIG)

    def run(*arguments: str) -> tuple[int, str]:
        ended = CliRunner().invoke(main, arguments)
        assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
        return ended.exit_code, ended.output

    return run


def test_commands_say_so_before_any_work(lockstep, tmp_path):
    (tmp_path / "file").touch()
    code, output = lockstep("summary", "--results", "file")
    assert code == 2 and "Directory 'file' is a file." in output
    (tmp_path / "results" / "m" / "fp32" / "graphs" / "assembly.json").mkdir(parents=True)
    process = call("stage_job", ("export", "m/fp32", "my.yaml", "results"), tmp_path, os.environ)
    assert process.returncode == 2 and process.stderr == (
        "lockstep: error: results/m/fp32/graphs/assembly.json: expected to write a file here, found a "
        "folder; remove or rename it, or choose another place\n"
    )
    code, output = lockstep("bundle", "m/fp32/all", "--out", str(tmp_path))
    assert code == 2 and f"File '{tmp_path}' is a directory." in output
    code, output = lockstep("bundle", "m/fp32/all", "--out", "demo")
    assert (
        code == 2
        and "--out: expected a name that ends in .tar, by which commands recognise a bundle, found demo" in output
    )
    code, output = lockstep("targets", "--config", str(tmp_path))
    assert code == 2 and output == (
        f"lockstep: error: {tmp_path}: expected a readable config file; found a folder; name the file in it\n"
    )


@pytest.mark.parametrize("text", ["0", "-1", "100000", "9" * 5000, "two", "²", "1.5"])
def test_a_number_of_threads_that_cannot_be_meant(monkeypatch, text):
    monkeypatch.setenv(THREADS_VARIABLE, text)
    cpus = len(os.sched_getaffinity(0))
    assert error_of(thread_count).startswith(
        f"{THREADS_VARIABLE}: expected 1 to {max(64, 4 * cpus)} ({cpus} CPUs are here), found {text[:37]}"
    )


def test_as_many_threads_as_a_job_may_ask_for(monkeypatch):
    monkeypatch.setenv(THREADS_VARIABLE, "")
    assert thread_count(16) == 16 and thread_count() == core_count()
