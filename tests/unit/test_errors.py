"""What a user sees of errors that are not ours: an interrupt, a full disk; and what stays a traceback."""

from __future__ import annotations

import errno
import os
import tempfile

import pytest

from lockstep.errors import guard

INTERRUPTED = "lockstep: error: interrupted; finished results are kept, run the same command to go on\n"


def test_an_interrupt_is_one_line(capsys):
    with pytest.raises(SystemExit) as left, guard():
        raise KeyboardInterrupt
    assert left.value.code == 130 and capsys.readouterr().err == INTERRUPTED


def test_an_interrupt_while_a_temporary_folder_is_removed_is_one(monkeypatch, capsys):
    """CPython's rmtree, interrupted while it closes the folder, closes it once more, and fails with a bad file descriptor."""
    real, interrupts = os.close, iter([KeyboardInterrupt])

    def close(number: int) -> None:
        real(number)
        for interrupt in interrupts:
            raise interrupt

    with pytest.raises(SystemExit) as left, guard(), tempfile.TemporaryDirectory():
        monkeypatch.setattr(os, "close", close)
    assert left.value.code == 130 and capsys.readouterr().err == INTERRUPTED


def test_a_full_disk_is_one_line_with_the_place(capsys):
    with pytest.raises(SystemExit) as left, guard():
        raise OSError(errno.ENOSPC, "No space left on device", "engines/middle.engine")
    assert left.value.code == 2
    assert capsys.readouterr().err == "lockstep: error: No space left on device (engines/middle.engine): free or make writable this place and run the same command again\n"


def test_what_nobody_can_do_anything_about_keeps_its_traceback():
    with pytest.raises(OSError, match="Bad file descriptor"), guard():
        raise OSError(errno.EBADF, "Bad file descriptor")
