"""The job of any stage: the table of stages says what it reads, makes and runs."""

import os

from job import job, lock_file, results_of, step_of

# The progress bar of a download stays on the terminal; all else goes to the log.
terminal = os.fdopen(os.dup(2), "w")


def of_a_download():
    from lockstep.artifacts.files import read_json
    from lockstep.config import load
    from lockstep.provenance.locked import fetch_terms

    config = load.load(read_json(snakemake.input.config))
    return {**fetch_terms(config, snakemake.wildcards.model, lock_file(snakemake)), "terminal": terminal}


@job(snakemake)
def stage():
    from pathlib import Path

    from lockstep.pipeline import jobs

    sides = snakemake.input.get("sides")
    folder = Path(sides[0]).parent if sides and not snakemake.input.fetched else None
    given = {"fetch": of_a_download, "make_checkpoint": lambda: {"path": snakemake.input.path[0]}}
    step = step_of(snakemake)
    adapters = {name: Path(place) for name, place in dict(snakemake.params.get("adapters", {})).items()}
    arguments = given.get(step.stage, dict)()
    jobs.run(jobs.Job(step, results_of(snakemake), folder, snakemake.threads, arguments, adapters))
