"""What a user sees of errors that are not ours: an interrupt, a full disk; and what stays a traceback."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.artifacts.files import write_json
from lockstep.errors import InputError, guard

INTERRUPTED = "lockstep: error: interrupted; finished results are kept, run the same command to go on\n"


def test_an_interrupt_is_one_line(capsys):
    with pytest.raises(SystemExit) as exit_info, guard():
        raise KeyboardInterrupt
    assert exit_info.value.code == 130 and capsys.readouterr().err == INTERRUPTED


def test_an_interrupt_that_became_a_message_is_one(capsys):
    with pytest.raises(SystemExit) as exit_info, guard():
        try:
            raise KeyboardInterrupt
        except BaseException as error:  # as native code's panics are taken
            raise InputError("expected a tokenizer") from error
    assert exit_info.value.code == 130 and capsys.readouterr().err == INTERRUPTED


def test_a_full_disk_is_one_line_with_the_place(capsys):
    with pytest.raises(SystemExit) as exit_info, guard():
        raise OSError(errno.ENOSPC, "No space left on device", "engines/middle.engine")
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == (
        "lockstep: error: No space left on device (engines/middle.engine): "
        "free space or make the place writable and run the same command again\n"
    )


def test_a_name_that_is_too_long_is_one_line(capsys, tmp_path):
    with pytest.raises(SystemExit) as exit_info, guard():
        (tmp_path / ("a" * 256)).write_text("")
    output = capsys.readouterr().err
    assert exit_info.value.code == 2 and output.startswith("lockstep: error: File name too long (")
    assert output.endswith("aaa): take a shorter one and run the same command again\n")


def test_a_name_that_is_no_utf_8_is_one_line_where_a_document_would_hold_it(capsys, tmp_path):
    path = os.fsdecode(b"folder of Z\xfcrich")
    with pytest.raises(SystemExit) as exit_info, guard():
        write_json(tmp_path / "weights.json", {"format": "x", "path": path})
    assert exit_info.value.code == 2 and not list(tmp_path.iterdir())
    assert "expected a name in UTF-8, found other bytes at the end of " in (output := capsys.readouterr().err)
    assert r"folder of Z\udcfc; rename it" in output


def test_what_nobody_can_do_anything_about_keeps_its_traceback():
    with pytest.raises(OSError, match="Bad file descriptor"), guard():
        raise OSError(errno.EBADF, "Bad file descriptor")


KEPT = "finished results are kept, run the same command to go on\n"


def started(script: str, *arguments: str, ready: Path, **options) -> subprocess.Popen:
    """A process of `script`, as soon as it has made the file `ready`."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(ready), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, **options,
    )  # fmt: skip
    end = time.monotonic() + 60
    while not ready.exists():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.01)
    return process


WORK = """
import contextlib, pathlib, sys, time
from lockstep.errors import InputError, guard
@contextlib.contextmanager
def undone(path):
    try:
        yield path.touch()
    except BaseException:
        time.sleep(0.3)  # long enough for a second signal
        path.unlink()
        raise
with guard(), undone(pathlib.Path(sys.argv[1])):
    for _ in range(600):  # a signal just before a sleep begins is seen when it ends
        time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_is_one_line_and_its_code_after_the_work_is_undone(tmp_path: Path, number: signal.Signals) -> None:
    process = started(WORK, ready=tmp_path / "half")
    process.send_signal(number)
    output = process.communicate(timeout=60)[1]
    name = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert (process.returncode, output) == (128 + number, f"lockstep: error: {name}; {KEPT}")
    assert not list(tmp_path.iterdir())


IGNORED = """
import pathlib, signal, sys, time
from lockstep.errors import InputError, guard
class Collected:
    def __del__(self):
        signal.raise_signal(int(sys.argv[2]))  # its handler raises here, which Python ignores
with guard():
    Collected()
    pathlib.Path(sys.argv[1]).touch()
    for _ in range(600):  # a signal just before a sleep begins is seen when it ends
        time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_hits_a_destructor_is_not_lost(tmp_path: Path, number: signal.Signals) -> None:
    process = started(IGNORED, str(int(number)), ready=tmp_path / "collected")
    output = process.communicate(timeout=30)[1]
    name = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert (process.returncode, output) == (128 + number, f"lockstep: error: {name}; {KEPT}")


LOADED = """
import signal, sys
number = int(sys.argv[1])
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "lockstep.cli.locks":  # one of the modules that the program loads
            signal.raise_signal(number)
sys.meta_path.insert(0, Finder)
from lockstep.cli.entry import main
sys.argv[1:] = ["summary"]
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_program_is_loaded_is_one_line(number: signal.Signals) -> None:
    command = [sys.executable, "-c", LOADED, str(int(number))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    name = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert (ended.returncode, ended.stderr) == (128 + number, f"lockstep: error: {name}; {KEPT}")


def test_a_second_signal_does_not_stop_the_undoing(tmp_path: Path) -> None:
    process = started(WORK, ready=tmp_path / "half")
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
        process.send_signal(number)
        time.sleep(0.1)
    output = process.communicate(timeout=60)[1]
    assert process.returncode in (128 + signal.SIGTERM, 128 + signal.SIGHUP) and output.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_closed_terminal_ends_nothing_under_nohup(tmp_path: Path) -> None:
    script = WORK.replace("range(600)", "range(10)")
    process = started(script, ready=tmp_path / "half", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    assert process.communicate(timeout=60)[1] == "" and process.returncode == 0 and (tmp_path / "half").exists()


PARENT = """
import sys
from lockstep import processes
from lockstep.errors import InputError, guard
with guard():
    processes.run([sys.executable, "-c", sys.argv[2], sys.argv[1]])
"""
DEAF = (
    "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "pathlib.Path(sys.argv[1]).write_text(''); time.sleep(60)"
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_child_undoes_its_work_and_ends_too(tmp_path: Path, number: signal.Signals) -> None:
    process = started(PARENT, WORK, ready=tmp_path / "half")
    process.send_signal(number)
    output = process.communicate(timeout=60)[1]
    assert (process.returncode, output) == (128 + number, f"lockstep: error: ended by {number.name}; {KEPT}"), (
        "one of the two says it"
    )
    assert not list(tmp_path.iterdir())


def test_a_child_that_does_not_end_is_killed(tmp_path: Path) -> None:
    """It holds the pipe of its standard error, so that reading it to its end shows that it is gone."""
    process = started(PARENT.replace("with guard", "processes.GRACE = 0.3\nwith guard"), DEAF, ready=tmp_path / "here")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[1] == (f"lockstep: error: ended by SIGTERM; {KEPT}")
    assert process.returncode == 143


def test_what_a_process_holds_is_walked_by_no_later_collection():
    script = (
        "import gc, lockstep.processes as p\nheld = [[] for _ in range(9999)]\np.freeze_heap()\n"
        "assert gc.get_freeze_count() > 9999 and not any(each is held for each in gc.get_objects())"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_text_goes_to_a_stdout_of_any_encoding_and_a_json_document_stays_one(encoding):
    text = "Zürich 日本 🙂"
    script = (
        f"import json; from lockstep.errors import guard\nwith guard(): print(json.dumps({text!r}, ensure_ascii=False))"
    )
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    process = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
    assert json.loads(process.stdout.decode(encoding)) == text


@pytest.mark.parametrize("stream", [1, 2])
def test_a_stream_that_is_closed_takes_what_goes_there_and_nothing_else_does(stream: int) -> None:
    script = (
        f"import os, sys; os.close({stream}); "
        "os.execv(sys.executable, [sys.executable, '-m', 'lockstep', 'serve', 'nowhere'])"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == 2 and process.stdout == ""
    assert process.stderr.count("\n") == (stream == 1)
