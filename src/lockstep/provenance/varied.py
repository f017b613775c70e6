"""Environments of a build that must not change its bytes, varied as by reprotest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.backends.cpu import THREADS_VARIABLE

# Spaces and letters beyond ASCII in paths, offsets of no whole hours, a locale whose small I is another letter, dates
# before and after those of all files, a home that nobody can write to, hash seeds at both ends.
_FOLDERS = ("a", "a folder/with ü", "deeper/and/deeper/than/the/others")
_VARIABLES = {
    "TZ": ("UTC", "Asia/Kathmandu", "America/St_Johns"),
    "LC_ALL": ("C", "C.UTF-8", "tr_TR.UTF-8"),
    "PYTHONHASHSEED": ("0", "1", "4294967295"),
    "SOURCE_DATE_EPOCH": ("0", "1000000000", "4000000000"),
    "USER": ("root", "nobody", "ü"),
    "HOME": ("/nonexistent", "/", "/tmp"),
    THREADS_VARIABLE: ("1", "2", "3"),
}
_UMASKS = (0o022, 0o077, 0o002)


@dataclass(frozen=True)
class Surroundings:
    """The environment of a round: its working folder below an empty one, variables and umask (-1: this process's)."""

    folder: str = "."
    variables: Mapping[str, str] = field(default_factory=dict)
    umask: int = -1


UNVARIED = Surroundings()


def varied_surroundings(number: int) -> Surroundings:
    """Return the surroundings of round `number`, from 1 on, each of which differs from the round before."""
    index = number % len(_FOLDERS)
    variables = {name: values[index] for name, values in _VARIABLES.items()}
    variables["PATH"] = os.pathsep.join([f"/round/{number}", os.environ.get("PATH", os.defpath)])
    return Surroundings(_FOLDERS[index], variables, _UMASKS[index])
