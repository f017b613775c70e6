# The engine set of one assembly on one backend. It holds no weights and no layer count.


rule build:
    input:
        assembly="<results>/{model}/{precision}/graphs/assembly.json",
    output:
        # Not deleted before the job: engines of graphs that have not changed are kept.
        update("<results>/{model}/{precision}/engines/{backend}/engines.json"),
    log:
        "<results>/logs/build/{model}/{precision}/{backend}.log",
    benchmark:
        "<results>/benchmarks/build/{model}/{precision}/{backend}.tsv"
    conda:
        "../../envs/engine.yaml"
    resources:
        **GPU_MODEL,
        mem_mb=memory(4000),
        runtime=minutes(180),
        gpu=gpus,
    params:
        options=of_config("options"),
        device=of_config("device"),
        stage=stage_of("build"),
    script:
        SCRIPTS["stage"]
