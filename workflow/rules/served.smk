# Whether a server on the engine set gives the answers of the golden check.


rule served:
    input:
        assembly="<results>/{model}/{precision}/graphs/assembly.json",
        weights="<results>/{model}/{precision}/weights.json",
        engines="<results>/{model}/{precision}/engines/{backend}/engines.json",
        reference=branch(
            is_quantized,
            then="<results>/{model}/{precision}/reference/{layers}.json",
            otherwise="<results>/{model}/reference/{layers}.json",
        ),
        logits=branch(
            is_quantized,
            then="<results>/{model}/{precision}/reference/{layers}.safetensors",
            otherwise="<results>/{model}/reference/{layers}.safetensors",
        ),
        golden="<results>/{model}/{precision}/golden/{backend}/{layers}.json",
    output:
        "<results>/{model}/{precision}/served/{backend}/{layers}.json",
    log:
        "<results>/logs/served/{model}/{precision}/{backend}/{layers}.log",
    benchmark:
        "<results>/benchmarks/served/{model}/{precision}/{backend}/{layers}.tsv"
    conda:
        "../../envs/serve.yaml"
    threads: compute_threads
    resources:
        **GPU_MODEL,
        mem_mb=memory(2500, 4.5),
        runtime=minutes(60, 30),
        gpu=gpus_of_ranks,
    params:
        tolerance=of_config("tolerance"),
        limits=of_config("limits"),
        device=of_config("device"),
        stage=stage_of("served"),
    script:
        SCRIPTS["stage"]
