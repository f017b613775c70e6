"""What every script calls: this checkout's package, and a job whose words go to its rule's log."""

import contextlib
import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
# The rule's key is of the code in this checkout, and an environment that conda made has no other.
sys.path.insert(0, str(REPOSITORY / "src"))

from lockstep.errors import NOTE, PREFIX, guard  # noqa: E402
from lockstep.provenance.locked import find_lock, is_locked  # noqa: E402
from lockstep.provenance.run import forget_other, run  # noqa: E402
from lockstep.stages import STAGES, Job  # noqa: E402


def run_stage(name, snakemake, **given):
    """Run the stage `name` as its rule's job. given: what only some stages take."""
    with logged(snakemake):
        run_job(name, snakemake, **given)


def run_job(name, snakemake, **given):
    """Do as `run_stage` does, where a script has its log already."""
    stage = STAGES[name]
    names = dict(snakemake.wildcards.items())
    job = Job(
        name,
        names,
        {key: Path(snakemake.input[key]) for key in stage.inputs(names.get("precision"))},
        snakemake.params.options,
        Path(snakemake.output[0]),
        device=snakemake.params.get("device"),
        threads=snakemake.threads,
        given=given,
    )
    try:
        run(job, lock_file=lock_file(snakemake), cache=snakemake.config.get("cache", ""))
    except BaseException:
        forget_other(job)
        raise


def checkpoint_folder(snakemake):
    """The folder of a checkpoint; None of one that another job brings, which lies where its manifest says."""
    sides = snakemake.input.sides
    return Path(sides[0]).parent if sides and not snakemake.input.fetched else None


@contextlib.contextmanager
def logged(snakemake):
    """Stdout and stderr, also those of native libraries, go to the rule's log.

    A user's mistake becomes one line there and on the terminal, before Snakemake's own words, and so does what a stage
    has to say.
    """
    terminal = os.dup(2)
    log = Path(snakemake.log[0])
    try:
        with guard(), open(log, "w") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
            yield
    except SystemExit:
        tell(terminal, log, PREFIX, last=1)
        raise
    tell(terminal, log, NOTE)


def tell(terminal, log, prefix, last=0):
    """Write the lines of a log that are for a person: errors, or what a stage has decided."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    for line in [line for line in lines if line.startswith(prefix)][-last:]:
        os.write(terminal, f"{line}\n".encode())


def lock_file(snakemake):
    """The lock that the job is held to: in a run with `--config locked=true`, of a job that is of one model."""
    if not is_locked(snakemake.config) or "model" not in snakemake.wildcards.keys():
        return None
    return find_lock(snakemake.wildcards.model, [Path(), REPOSITORY])
