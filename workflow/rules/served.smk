# Whether a server on the engine set answers what the golden check found.


rule served:
    input:
        assembly="<results>/{model}/{precision}/graphs/assembly.json",
        weights="<results>/{model}/{precision}/weights.json",
        engines="<results>/{model}/{precision}/engines/{backend}/engines.json",
        reference=of_precision("reference"),
        logits=of_precision("reference", ".safetensors"),
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
        options=options_of("served"),
        device=device,
        key=key_of("served"),
    script:
        "../scripts/served.py"
