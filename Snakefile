# Lockstep: from checkpoints to inference engines that are checked. README.md says how to use it, config/README.md what to set.
import sys
from pathlib import Path

from snakemake.utils import min_version

min_version("9.17")

REPOSITORY = Path(workflow.current_basedir.get_path_or_uri(secret_free=True))
# This checkout's package, installed or not: the one whose code the rules' keys are of.
sys.path.insert(0, str(REPOSITORY / "src"))

from lockstep.config.documents import check_config
from lockstep.errors import guard

# The demo, unless the command line names models: a second config file would add its models to these.
if "models" not in config:
    demo = "config/config.yaml"
    demo = demo if os.path.exists(demo) else str(REPOSITORY / demo)
    # Snakemake does not say where a mistake is.
    with guard():
        check_config(demo)

    configfile: demo


# The image to run jobs in (`--sdm apptainer --config container=docker://...`), made by the Dockerfile of this checkout.
if "container" in config:

    container: config["container"]


report: "workflow/report/workflow.rst"


include: "workflow/rules/config.smk"
include: "workflow/rules/common.smk"
include: "workflow/rules/resources.smk"
include: "workflow/rules/checkpoint.smk"
include: "workflow/rules/export.smk"
include: "workflow/rules/build.smk"
include: "workflow/rules/compare.smk"
include: "workflow/rules/golden.smk"
include: "workflow/rules/served.smk"
include: "workflow/rules/adapters.smk"
include: "workflow/rules/report.smk"


onsuccess:
    # A run of some targets alone makes no summary: one that is there says what the checks say by now.
    if workflow.is_main_process:
        with guard():
            refresh(PLACE)


onerror:
    # Snakemake keeps the last of these blocks only. What failed, and what has not run, stands in the table all the same.
    if workflow.is_main_process:
        try:
            summarise(PLACE, TARGETS, NOT_RUN)
        except (LockstepError, OSError) as error:
            logger.error(f"no summary of what has run: {error}")


rule all:
    default_target: True
    input:
        *final_files(),
