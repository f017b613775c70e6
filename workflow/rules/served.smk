# Whether a server on the engine set answers what the golden check found.
#
# needs: weights.json, assembly.json, engines.json, the reference and the golden check
# makes: <model>/<precision>/served/<backend>/<layers>.json


rule served:
    input:
        **inputs_of("served"),
        logits=reference_logits,
    output:
        check=RESULTS.served(MODEL, PRECISION, LAYERS, BACKEND),
    log:
        log_of("served", MODEL, PRECISION, BACKEND, LAYERS),
    conda:
        "../../envs/serve.yaml"
    threads: compute_threads
    resources:
        **GPU_MODEL,
        mem_mb=memory("served"),
        runtime=minutes("served"),
        gpu=gpus_of_ranks,
    params:
        **OF_DEVICE,
        options=options_of("served"),
        python=interpreter,
        key=key_of("served"),
    message:
        "Server on {wildcards.model} in {wildcards.precision} on {wildcards.backend}, layers: {wildcards.layers}"
    script:
        "../scripts/stage.py"
