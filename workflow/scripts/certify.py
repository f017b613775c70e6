"""Hypotheses, and an endpoint of the config -> its certificate and page."""

import os
from pathlib import Path

from lockstep.artifacts.certificate import AS_PUBLISHED
from lockstep.artifacts.files import write_bytes
from lockstep.certify.client import Endpoint
from lockstep.certify.run import certify
from lockstep.manifests.manifest_files import failed_path
from lockstep.report import pages
from lockstep.workflow.job import logged

with logged(snakemake):
    options = snakemake.params.endpoint
    endpoint = Endpoint(
        options["url"],
        options["served_name"],
        os.environ.get(options["key_env"]) or None,
        options["timeout"],
        options["rate"],
        options["requests"],
    )
    certificate = certify(endpoint, Path(snakemake.input[0]), options["company"])
    path = Path(snakemake.output.certificate)
    page = Path(snakemake.output.page)
    write_bytes(page, pages.certificate(page, certificate))
    certificate.save(path if certificate.verdict == AS_PUBLISHED else failed_path(path))
    certificate.check()
