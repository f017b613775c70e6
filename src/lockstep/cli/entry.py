"""The entry point of the `lockstep` program.

In: the command line. `main` loads the commands and runs the named one. Loading takes a third of a second; Ctrl-C is one
line even then, because the guard is entered before the imports.
"""

from __future__ import annotations

import os
import sys

from lockstep.errors import guard


def main() -> None:
    _open_closed_streams()
    with guard():
        from lockstep.cli.main import main as command
    # Outside the guard, as `GuardedGroup` has one. Named, so that usage lines of `python -m lockstep` say "lockstep".
    command(prog_name="lockstep")


def _open_closed_streams() -> None:
    """Open standard streams that the caller closed (`>&-`) on /dev/null: the next file would get their descriptor."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)
            # Descriptors 0 to 2 are inheritable by default; child processes would find them closed again.
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
