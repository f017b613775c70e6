# The config as it is used.


rule config:
    output:
        "<results>/config.json",
    log:
        "<results>/logs/config.log",
    benchmark:
        "<results>/benchmarks/config.tsv"
    localrule: True
    conda:
        "../../envs/checkpoint.yaml"
    params:
        options=lambda wildcards: STAGES["config"].options(CONFIG, {}),
    script:
        "../scripts/config.py"
