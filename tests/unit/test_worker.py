"""Stages in another Python: the same results, the same line for a mistake, the same exit code."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from demo_model import GOLDEN, LIMITS

from lockstep import processes
from lockstep.config import backends
from lockstep.errors import CheckError, InputError
from lockstep.stages import Job, worker
from lockstep.targets import Results

IDENTITY = "lockstep.backends.identity:identity"


@pytest.fixture
def python(tmp_path: Path):
    """Makes an interpreter of a shell script's lines."""

    def make(*lines: str) -> str:
        path = tmp_path / "python"
        path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
        path.chmod(0o755)
        return str(path)

    return make


def job(demo: Results, out: Path, python: str | None = sys.executable, **options) -> Job:
    return Job(
        "build", {"model": "demo-llama", "precision": "fp32", "backend": "onnxruntime"},
        {"assembly": demo.assembly("demo-llama", "fp32")}, {"options": options}, out / "engines.json", python=python,
    )  # fmt: skip


def test_another_interpreter_builds_the_same(demo: Results, tmp_path: Path) -> None:
    worker.run(job(demo, tmp_path / "engines"))
    here = demo.engines("demo-llama", "fp32", "onnxruntime").parent
    assert {path.name: path.read_bytes() for path in here.iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "engines").iterdir()
    }


def test_another_interpreter_answers_the_same() -> None:
    assert worker.ask(sys.executable, IDENTITY, name="onnxruntime") == worker.ask(None, IDENTITY, name="onnxruntime")


@pytest.mark.parametrize("interpreter", [None, sys.executable])
def test_a_mistake_is_the_same_line_and_exit_code_here_and_there(demo, tmp_path, interpreter) -> None:
    script = (
        "from pathlib import Path\nfrom lockstep.stages import STAGES, Job\nfrom lockstep.errors import guard\n"
        f"with guard(): STAGES['build'].make({job(demo, tmp_path, interpreter, level='all')!r})"
    ).replace("PosixPath(", "Path(")
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 2 and not list(tmp_path.glob("*.json"))
    assert ended.stderr == (
        "lockstep: error: options of backend onnxruntime: expected only "
        "optimization_level, opset, fuse_projections, found level\n"
    )


@pytest.mark.parametrize("interpreter", [None, sys.executable])
def test_text_comes_from_here_and_there(demo, interpreter, capfd) -> None:
    names = ("demo-llama", "fp32")
    worker.call(
        interpreter, "lockstep.runtime.command:generate", assembly=str(demo.assembly(*names)),
        weights=str(demo.weights(*names)), engines=str(demo.engines(*names, "onnxruntime")), layers="all",
        limits=asdict(LIMITS), prompt="San Francisco is a", max_new_tokens=16, sampling={"temperature": 0.0}, stop=[],
    )  # fmt: skip
    said = capfd.readouterr()
    assert said.out == f"{GOLDEN.prompts[0].expected['all']}\n" and said.err.startswith("prefill: 8 tokens, ")


def test_a_backend_of_another_interpreter_is_named_by_its_own_key(tmp_path, monkeypatch) -> None:
    """The key comes from the backends' settings: the one here that has an interpreter is another than today's."""
    settings = backends.backends()
    renamed = {"other": settings["tensorrt"], "onnxruntime": settings["onnxruntime"]}
    monkeypatch.setattr(backends, "backends", lambda: renamed)
    with pytest.raises(InputError, match="^backends.other.python: expected a Python interpreter"):
        worker.call("/nowhere/python3.10", IDENTITY)


def test_an_interpreter_that_is_not_there_or_none_at_all_is_named(tmp_path) -> None:
    for name in ("/nowhere/python3.10", str(tmp_path)):
        with pytest.raises(
            InputError, match=f"backends.tensorrt.python: expected a Python interpreter, found '{name}'"
        ):
            worker.call(name, IDENTITY)


def test_a_package_that_the_interpreter_lacks_is_named(demo, tmp_path, python, capfd) -> None:
    with pytest.raises(SystemExit) as ended:
        worker.run(job(demo, tmp_path, python(f'exec {sys.executable} -S "$@"')))
    assert ended.value.code == 2
    line = capfd.readouterr().err
    assert line.count("\n") == 1 and "has no Python package '" in line
    assert line.startswith("lockstep: error: backends.tensorrt.python: ")


def test_a_question_that_cannot_be_answered_is_an_error_to_be_caught(python, capfd) -> None:
    """As where the other interpreter's library finds no GPU: its line is the error's, and is said once."""
    with pytest.raises(InputError) as error:
        worker.ask(python("echo a warning >&2", f'exec {sys.executable} "$@"'), IDENTITY, name="nothing")
    assert str(error.value) == f"backend: expected one of {', '.join(backends.backends())}, found 'nothing'"
    assert not capfd.readouterr().err
    with pytest.raises(CheckError, match="^other bytes$"):
        worker.ask(python("echo lockstep: error: other bytes >&2", "exit 1"), IDENTITY, name="onnxruntime")


def test_an_interrupted_question_ends_as_one(python, capfd) -> None:
    with pytest.raises(SystemExit) as ended:
        worker.ask(python("echo lockstep: error: interrupted >&2", "exit 130"), IDENTITY, name="onnxruntime")
    assert ended.value.code == 130 and capfd.readouterr().err == "lockstep: error: interrupted\n"


def test_a_defect_in_the_other_interpreter_keeps_its_traceback(python, capfd) -> None:
    with pytest.raises(SystemExit) as ended:
        worker.ask(sys.executable, IDENTITY, nme="onnxruntime")
    said = capfd.readouterr().err
    assert ended.value.code == 1 and said.startswith("Traceback")
    assert ("unexpected keyword argument 'nme'") in said.splitlines()[-1]


def test_what_is_said_beside_an_answer_is_shown(python, capfd) -> None:
    assert (
        worker.ask(python("echo a warning >&2", f'exec {sys.executable} "$@"'), IDENTITY, name="onnxruntime")["name"]
        == "onnxruntime"
    )
    assert capfd.readouterr().err == "a warning\n"


@pytest.mark.parametrize(
    ("stage", "lines"),
    [("call", ("kill -9 $$",)), ("ask", ("sh -c 'kill -9 $$'; exit $?",))],
    ids=["itself", "behind a shell"],
)
def test_an_interpreter_that_is_killed_is_told_with_the_signal(python, stage, lines) -> None:
    with pytest.raises(CheckError, match="build: .*python was ended by SIGKILL"):
        getattr(worker, stage)(python(*lines), "build")


@pytest.mark.parametrize("code", [129, 130, 143, 255])
def test_a_code_that_is_no_signal_or_that_the_stage_has_explained_stays_it(python, code) -> None:
    with pytest.raises(SystemExit) as ended:
        worker.call(python(f"exit {code}"), IDENTITY)
    assert ended.value.code == code


def test_a_stage_in_an_interpreter_without_the_workflows_packages_calls_another(tmp_path, monkeypatch) -> None:
    """As a benchmark does, which builds engines in a process of their own from the one that runs them."""
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "__init__.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        "from without_extras import Absent\nsys.meta_path.insert(0, Absent())\n"
        "from lockstep.stages import worker\n"
        "def ask(python): return worker.ask(python, 'lockstep.backends.identity:identity', name='onnxruntime')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert worker.ask(sys.executable, "without:ask", python=sys.executable)["name"] == "onnxruntime"


def test_a_users_files_are_no_modules_of_ours_and_their_functions_can_be_called(tmp_path, monkeypatch) -> None:
    for name in ("types", "lockstep"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('a file of the working directory')\n")
    (tmp_path / "mine.py").write_text("def answer(): return 3\n")
    monkeypatch.chdir(tmp_path)
    assert worker.ask(sys.executable, "mine:answer") == 3
    command = [sys.executable, "-m", "lockstep", "--version"]
    assert subprocess.run(command, env=processes.environment(None), stdout=subprocess.PIPE).returncode == 0
