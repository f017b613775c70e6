# Whether a server on the engine set answers what the golden check found.
#
# needs: weights.json, assembly.json, engines.json, the reference and the golden check
# makes: <model>/<precision>/served/<backend>/<layers>.json


rule served:
    input:
        assembly="<results>/{model}/{precision}/graphs/assembly.json",
        weights="<results>/{model}/{precision}/weights.json",
        engines="<results>/{model}/{precision}/engines/{backend}/engines.json",
        reference=reference,
        logits=reference_logits,
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
        python=interpreter,
        device=device,
        key=key_of("served"),
    message:
        "Server on {wildcards.model} in {wildcards.precision} on {wildcards.backend}, layers: {wildcards.layers}"
    script:
        "../scripts/served.py"
