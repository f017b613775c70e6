# The config as it is used.
#
# needs: the config file
# makes: results/config.json


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
    message:
        "Config as it is used"
    script:
        "../scripts/config.py"
