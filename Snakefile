# `snakemake` in this folder: the workflow is workflow/Snakefile.
include: "workflow/Snakefile"


# An included default target does not count.
rule default:
    default_target: True
    input:
        rules.all.input,
    message:
        "All targets"
