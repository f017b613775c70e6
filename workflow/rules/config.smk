# The config as it is used. This file comes before common.smk, which takes the results folder from this rule's output, and
# whose functions are only there when a job asks for its parameters.


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
        config=lambda wildcards: of_config("config")(wildcards),
        stage=lambda wildcards: stage_of("config")(wildcards),
    script:
        SCRIPTS["stage"]
