# Lockstep: from checkpoints to inference engines that are checked. README.md says how to use it, config/README.md what to set.
from snakemake.utils import min_version

min_version("9.0")


# The demo, unless the command line names models: a second config file would add its models to these.
if "models" not in config:
    here = workflow.current_basedir.get_path_or_uri(secret_free=True)
    demo = "config/config.yaml"

    configfile: demo if os.path.exists(demo) else os.path.join(here, demo)


report: "workflow/report/workflow.rst"


include: "workflow/rules/common.smk"
include: "workflow/rules/checkpoint.smk"
include: "workflow/rules/export.smk"
include: "workflow/rules/build.smk"
include: "workflow/rules/compare.smk"
include: "workflow/rules/golden.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/recovery.smk"


rule all:
    default_target: True
    input:
        # Not the last only: a deleted file is made again if it is asked for here, or if something needs it anew.
        MANIFESTS,
        REPORTS,
    message:
        "All targets"
