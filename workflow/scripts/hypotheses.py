"""checkpoint.json and golden's reference -> what each hypothesis on an endpoint expects."""

from pathlib import Path

from lockstep.certify.tables import make_hypotheses
from lockstep.workflow.job import logged

with logged(snakemake):
    make_hypotheses(Path(snakemake.input.checkpoint), Path(snakemake.input.reference), Path(snakemake.output[0]))
