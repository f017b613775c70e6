"""Commands that need results, where there are none: one line that says what to do, exit code 2, and nothing written."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from demo_model import ROOT

from lockstep.cli import run
from lockstep.cli.main import main
from lockstep.config.load import load
from lockstep.targets import Results
from stage_job import main as run_job

TARGET = "demo-llama/fp16/all"
NEEDS_RESULTS = {
    "summary": ("summary",), "report": ("report",), "generate": ("generate", TARGET, "--prompt", "A"),
    "bundle": ("bundle", TARGET), "explain": ("explain", TARGET), "reproduce": ("reproduce", TARGET), "lock": ("lock",),
    "lock of a model": ("lock", "demo-llama"), "verify": ("verify",), "verify of a model": ("verify", "demo-llama"),
}  # fmt: skip


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with config and checkpoint, where nothing has run."""
    for name in ("config", "resources"):
        shutil.copytree(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("arguments", NEEDS_RESULTS.values(), ids=NEEDS_RESULTS)
def test_without_results_a_command_says_to_run_first(
    project: Path, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(project.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main(list(arguments), prog_name="lockstep")
    output = capsys.readouterr()
    assert ended.value.code == 2 and not output.out
    (line,) = output.err.splitlines()
    assert line.startswith("lockstep: error: results") and "expected results" in line
    assert "run `lockstep run` first" in line
    assert sorted(project.rglob("*")) == before


def test_a_run_needs_a_folder_for_snakemakes_cache_and_no_name_of_its_user(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container, whose user is a number."""
    for name in ("LOGNAME", "LNAME", "USERNAME", "USER"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    for home in (str(project / "config" / "config.yaml"), "/dev/null/cache", "/proc/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", home)
        with pytest.raises(SystemExit) as ended:
            main(["run"], prog_name="lockstep")
        assert ended.value.code == 2 and os.environ["USER"] == "12345"
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith(f"lockstep: error: {home}/snakemake: expected") and "; set XDG_CACHE_HOME to one" in line


def test_a_second_run_in_a_folder_names_the_first(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Snakemake's advice, --unlock, is for a run that died: two at once write the same files."""
    (project / "first.smk").write_text("rule:\n    output: 'done'\n    shell: 'sleep 600'\n")
    command = [sys.executable, "-m", "snakemake", "--snakefile", "first.smk", "--cores", "1"]
    first = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE)
    try:
        end = time.monotonic() + 60
        while not any(Path(".snakemake/locks").glob("*")):
            assert first.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        with pytest.raises(SystemExit) as ended:
            main(["run"], prog_name="lockstep")
        line = capsys.readouterr().err.splitlines()[-1]
        assert ended.value.code == 2 and f"found process {first.pid};" in line
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate()


def test_targets_need_no_results(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["targets"], prog_name="lockstep", standalone_mode=False)
    assert f"{TARGET}/onnxruntime" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("link", ["results", "results/demo-llama"])
def test_results_that_are_a_link_to_another_disk_are_what_was_recorded(project: Path, link: str) -> None:
    disk = project / "disk" / "of" / "much" / "room"
    disk.mkdir(parents=True)
    (project / link).parent.mkdir(exist_ok=True)
    (project / link).symlink_to(disk)
    run_job(("resolve", TARGET, "config/config.yaml", "results"))
    main(["verify"], prog_name="lockstep", standalone_mode=False)


def test_a_config_with_keys_of_another_version_says_what_makes_it_again(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "results").mkdir()
    (project / "results" / "config.json").write_text('{"models": {}, "gone": 1}')
    with pytest.raises(SystemExit):
        main(["summary"], prog_name="lockstep")
    (line,) = capsys.readouterr().err.splitlines()
    assert "results/config.json: gone: unknown key" in line and line.endswith(
        "version of Lockstep wrote it: `lockstep run` makes it again"
    )


def test_an_unknown_target_names_the_config_that_has_the_others(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"source": "resources/demo-llama", "golden": {"prompts": [{"text": "A"}]}}
    (project / "results").mkdir()
    (project / "results" / "config.json").write_text(json.dumps({"models": {"other": other}}))
    expected = "expected one of other/fp32/all, in results/config.json, the config of the last run; found 'demo-llama"
    for command in (("generate", "--prompt", "A", TARGET), ("bundle", TARGET), ("bisect", TARGET)):
        with pytest.raises(SystemExit):
            main(list(command), prog_name="lockstep")
        assert expected in capsys.readouterr().err
    Results(project / "results").checkpoint("demo-llama").parent.mkdir()
    Results(project / "results").checkpoint("demo-llama").touch()
    with pytest.raises(SystemExit):
        main(["bundle", TARGET], prog_name="lockstep")
    assert f"(results/config.json, models other), found {TARGET} of an earlier run; run its" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["explain", "other/fp32/all"], prog_name="lockstep")
    assert f"in {project}/config/config.yaml; --config names another; found 'other/fp32" in capsys.readouterr().err


def test_help_has_each_command_once_below_a_title(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"], prog_name="lockstep", standalone_mode=False)
    first, *sections = capsys.readouterr().out.split("\n\n")[-6:]
    assert "--version" in first and all(re.match(r"[A-Z][^\n]+:\n", section) for section in sections)
    lines = []
    for section in sections:
        lines += section.splitlines()[1:]
    listed = [line.split()[0] for line in lines]
    assert listed[:3] == ["doctor", "init", "run"] and sorted(listed) == sorted(main.commands)
    assert not [line for line in lines if line.endswith("...")], "no line is cut"


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"]])
def test_help_onto_a_full_disk_is_one_line(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "lockstep", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ended.returncode == 2
    assert ended.stderr.splitlines() == [
        "lockstep: error: No space left on device: free space or make the place writable and run the same command again"
    ]


def test_help_of_many_options_has_each_once_in_80_columns() -> None:
    """Those of serve and generate are in groups."""
    for name in ("serve", "generate"):
        command = main.commands[name]
        text = CliRunner().invoke(main, [name, "--help"], env={"COLUMNS": "80"}, prog_name="lockstep").output
        listed = re.findall(r"^  (--[a-z-]+|-h, --help)", text, re.MULTILINE)
        assert (
            len(listed)
            == len(set(listed))
            == len([param for param in command.params if isinstance(param, click.Option)]) + 1
        )
        assert max(map(len, text.splitlines())) <= 80


def test_a_shell_completes_the_targets_of_the_last_run(project: Path) -> None:
    def completed(words: str) -> list[str]:
        line = {"_LOCKSTEP_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": "2"}
        ended = subprocess.run(
            [sys.executable, "-m", "lockstep"], env=os.environ | line, capture_output=True, text=True
        )
        assert not ended.stderr
        return ended.stdout.split()

    assert completed("lockstep serve demo") == []
    (project / "results").mkdir()
    (project / "results" / "config.json").write_text(json.dumps(load(project / "config" / "config.yaml").dump()))
    actual = completed("lockstep serve demo-llama/fp16/2")
    assert "plain,demo-llama/fp16/2/onnxruntime" in actual and not any("fp32" in word for word in actual)


@pytest.mark.parametrize("name", ["results/m/fp32/engines/onnxruntime.json", "results/report/index.html"])
def test_a_result_that_is_asked_for_is_no_config(name: str) -> None:
    assert run.split_arguments((name, "-n")) == (None, (name, "-n"))
    assert run.split_arguments(("my/config.json", name)) == ("my/config.json", (name,))
