# Whether endpoints of the config serve its models as published.


rule hypotheses:
    input:
        checkpoint="<results>/{model}/checkpoint.json",
        reference="<results>/{model}/reference/all.json",
    output:
        manifest="<results>/{model}/hypotheses/all.json",
        tables="<results>/{model}/hypotheses/all.safetensors",
    log:
        "<results>/logs/hypotheses/{model}.log",
    benchmark:
        "<results>/benchmarks/hypotheses/{model}.tsv"
    conda:
        "../../envs/torch.yaml"
    threads: compute_threads
    resources:
        mem_mb=memory(2500, 4),
        runtime=minutes(60, 20),
    script:
        SCRIPTS["hypotheses"]


rule certify:
    input:
        lambda wildcards: f"<results>/{plan()['endpoints'][wildcards.endpoint]['model']}/hypotheses/all.json",
    output:
        certificate="<results>/endpoints/{endpoint}.json",
        page=report("<results>/endpoints/{endpoint}.html", category="Endpoints", labels={"endpoint": "{endpoint}"}),
    log:
        "<results>/logs/certify/{endpoint}.log",
    benchmark:
        "<results>/benchmarks/certify/{endpoint}.tsv"
    localrule: True  # a cluster's nodes may not reach it
    conda:
        "../../envs/report.yaml"
    params:
        endpoint=lambda wildcards: plan()["endpoints"][wildcards.endpoint],
    script:
        SCRIPTS["certify"]
