"""What every script opens with: this checkout's package, and all that the job says in its rule's log."""

import contextlib
import os
import sys
import time
from pathlib import Path

# The rule's key is of the code in this checkout, and an environment that conda made has no other.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from lockstep.errors import NOTE, PREFIX, guard  # noqa: E402
from lockstep.pipeline.stages import REPORTS, STAGES  # noqa: E402
from lockstep.provenance import run as stage  # noqa: E402
from lockstep.provenance.locked import find_lock, is_locked  # noqa: E402
from lockstep.report import renew  # noqa: E402
from lockstep.targets import Results, Target  # noqa: E402


def job(snakemake):
    """Decorate the script's function: it runs at once, as the job. Stdout and stderr, also those of native libraries,
    go to the rule's log; a user's mistake becomes one line there and on the terminal, before Snakemake's own words, and
    so does what a stage has to say. What was made is recorded beside it."""

    results = results_of(snakemake)

    def run(make):
        terminal = os.dup(2)
        try:
            with guard(), open(snakemake.log[0], "w") as file, renew.refreshed(results, by_hand=False):
                for stream in (1, 2):
                    os.dup2(file.fileno(), stream)
                take_back_from_the_future(snakemake.input, results)
                stage.run(step_of(snakemake), make, lock_file(snakemake), snakemake.config.get("cache", ""))
        except SystemExit as ended:
            _tell(terminal, _said(snakemake.log[0], PREFIX)[-1:])
            with contextlib.suppress(KeyError), open(os.environ["LOCKSTEP_EXIT_CODES"], "a") as file:
                file.write(f"{ended.code}\n")
            raise
        _tell(terminal, _said(snakemake.log[0], NOTE))

    return run


def _said(log, prefix):
    """The lines of a log that are for a person: errors, or what a stage has decided."""
    log = Path(log)  # a job that ended before it could open it has said so on the terminal
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return [line for line in lines if line.startswith(prefix)]


def _tell(terminal, lines):
    for line in lines:
        os.write(terminal, f"{line}\n".encode())


def results_of(snakemake):
    """The results tree that the job is of: its log lies in it. A module's `prefix` stands before it."""
    return Results(next(folder.parent for folder in Path(snakemake.log[0]).parents if folder.name == "logs"))


def take_back_from_the_future(paths, results):
    """Give results of a clock that was ahead the present time: what is made from them would look older, and Snakemake
    would refuse it."""
    for path in map(Path, paths):
        if path.is_relative_to(results.root) and path.is_file() and path.stat().st_mtime > time.time():
            with contextlib.suppress(OSError):  # a folder that cannot be written: Snakemake says what it says
                os.utime(path)


def lock_file(snakemake):
    """The lock that the job is held to: in a run with `--config locked=true`, of a job that is of one model."""
    if not is_locked(snakemake.config) or "model" not in snakemake.wildcards.keys():
        return None
    return find_lock(snakemake.wildcards.model, [Path(), Path(__file__).resolve().parents[2]])


def stage_of(rule):
    """The stage that a rule is of, also where a module has renamed it (`use rule * from lockstep as lockstep_*`)."""
    return max(
        (name for name in (*STAGES, *REPORTS, "config") if f"_{rule}".endswith(f"_{name}")), key=len, default=rule
    )


def step_of(snakemake):
    inputs = {name: value if isinstance(value, str) else list(value) for name, value in snakemake.input.items()}
    return stage.from_rule(
        stage_of(snakemake.rule),
        dict(snakemake.wildcards.items()),
        inputs,
        dict(snakemake.params.items()),
        outputs_of(snakemake),
    )


def outputs_of(snakemake):
    """What the job makes; the pages of all targets instead of their folder."""
    results, outputs = results_of(snakemake), list(snakemake.output)
    folder = str(results.target_pages())
    if folder not in outputs:
        return outputs
    outputs.remove(folder)
    return [*outputs, *(str(results.target_page(Target.parse(name))) for name in snakemake.params.targets)]
