"""Commands of Snakemake and `lockstep`, run in the test's process, which has imported their packages already."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

# Where a module has the function that is given its arguments, if not itself.
MAINS = {"snakemake": "snakemake.cli", "lockstep": "lockstep.cli.main"}


def call(
    module: str, arguments: tuple[str, ...], folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess:
    """Run `python -m module arguments` in `folder`, without the start of a process.

    Returns its exit status and output.
    """
    main = importlib.import_module(MAINS.get(module, module)).main
    out = io.StringIO()
    err = io.StringIO()
    with _inside(folder, environment, [module, *arguments]):
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(list(arguments))
                code = 0
            except SystemExit as ended:
                code = ended.code or 0
    return subprocess.CompletedProcess([module, *arguments], code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _inside(folder: Path, environment: Mapping[str, str], argv: list[str]) -> Iterator[None]:
    """Put this process in the place of one that is started in `folder`. With this environment."""
    before = dict(os.environ)
    path = list(sys.path)
    arguments = sys.argv
    try:
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = argv
        with contextlib.chdir(folder):
            yield
    finally:
        sys.path[:] = path
        sys.argv = arguments
        os.environ.clear()
        os.environ.update(before)
