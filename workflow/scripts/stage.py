"""The job of any stage: the table of stages says what it reads, makes and runs."""

import os

from job import RESULTS, job, lock_file, step_of

# The progress bar of a download stays on the terminal; all else goes to the log.
terminal = os.fdopen(os.dup(2), "w")


def fetch_terms():
    """What a download is held to."""
    from lockstep.artifacts.files import read_json
    from lockstep.config import load
    from lockstep.provenance.locked import before_weights, locked_commit

    lock = lock_file(snakemake)
    check = before_weights(load.load(read_json(snakemake.input.config)), snakemake.wildcards.model, lock)
    commit = locked_commit(lock, snakemake.params.options["source"]) if lock else None
    return {"check": check, "terminal": terminal, "commit": commit}


@job(snakemake)
def stage():
    from pathlib import Path

    from lockstep.pipeline import jobs

    sides = snakemake.input.get("sides")
    folder = Path(sides[0]).parent if sides and not snakemake.input.fetched else None
    given = {"fetch": fetch_terms, "random_weights": lambda: {"config": snakemake.input.config[0]}}
    step = step_of(snakemake)
    jobs.run(jobs.Job(step, RESULTS, folder, snakemake.threads, given.get(step.stage, dict)()))
