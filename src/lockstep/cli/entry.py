"""The `lockstep` program, as it is started.

In: the command line. `main` loads the commands and runs the one that is asked for. Loading takes a third of a second;
Ctrl-C in it is one line, as it is later, for little is imported before the guard.
"""

from __future__ import annotations

from lockstep.errors import guard


def main() -> None:
    with guard():
        from lockstep.cli.main import main as command
    command(prog_name="lockstep")  # also of `python -m lockstep`
