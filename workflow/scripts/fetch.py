"""A model on the hub -> source.json and its folder."""

from lockstep.artifacts.files import read_json
from lockstep.config.load import load
from lockstep.provenance.locked import fetch_parameters
from lockstep.workflow.job import lock_file, logged, run_job

with logged(snakemake):
    config = load(read_json(snakemake.input.config))
    parameters = fetch_parameters(config, snakemake.wildcards.model, lock_file(snakemake))
    run_job(snakemake, **parameters)
