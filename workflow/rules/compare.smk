# Each engine of a set against its graph as it is written, in ONNX Runtime and Polygraphy.
#
# needs: assembly.json, weights.json, engines.json
# makes: <model>/<precision>/compare/<backend>.json


rule compare:
    input:
        **inputs_of("compare"),
    output:
        output_of("compare"),
    log:
        log_of("compare", MODEL, PRECISION, BACKEND),
    conda:
        "../../envs/engine.yaml"
    threads: compute_threads
    resources:
        **GPU_MODEL,
        mem_mb=memory("compare"),
        runtime=minutes("compare"),
        gpu=gpus,
    params:
        **OF_DEVICE,
        options=options_of("compare"),
        python=interpreter,
        key=key_of("compare"),
    message:
        "Compare engines of {wildcards.model} in {wildcards.precision} on {wildcards.backend} with ONNX Runtime"
    script:
        "../scripts/stage.py"
