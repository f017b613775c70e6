# What the model says in Hugging Face transformers, and whether the engine set says the same.
#
# needs: checkpoint.json for the reference, weights.json for that of quantised weights; for the check also assembly.json, engines.json
# makes: <model>/reference/<layers>.json and .safetensors, <model>/<precision>/reference/<layers>.json, .safetensors and .drift.json,
#        <model>/<precision>/golden/<backend>/<layers>.json and .speed.json


rule reference:
    input:
        **inputs_of("reference"),
    output:
        manifest=RESULTS.reference(MODEL, LAYERS),
        logits=RESULTS.logits(MODEL, LAYERS),
    log:
        log_of("reference", MODEL, LAYERS),
    conda:
        "../../envs/torch.yaml"
    threads: compute_threads
    resources:
        mem_mb=memory("reference"),
        runtime=minutes("reference"),
    params:
        options=options_of("reference"),
        key=key_of("reference"),
    message:
        "Reference of {wildcards.model} from transformers, layers: {wildcards.layers}"
    script:
        "../scripts/stage.py"


rule quantized_reference:
    input:
        **inputs_of("quantized_reference"),
        logits=RESULTS.logits(MODEL, LAYERS),
    output:
        manifest=RESULTS.quantized_reference(MODEL, PRECISION, LAYERS),
        logits=RESULTS.quantized_logits(MODEL, PRECISION, LAYERS),
        drift=RESULTS.drift(MODEL, PRECISION, LAYERS),
    log:
        log_of("quantized_reference", MODEL, PRECISION, LAYERS),
    conda:
        "../../envs/torch.yaml"
    threads: compute_threads
    resources:
        mem_mb=memory("quantized_reference"),
        runtime=minutes("quantized_reference"),
    params:
        options=options_of("quantized_reference"),
        key=key_of("quantized_reference"),
    message:
        "Reference of {wildcards.model} in {wildcards.precision} from transformers, layers: {wildcards.layers}"
    script:
        "../scripts/stage.py"


rule golden:
    input:
        **inputs_of("golden"),
        logits=reference_logits,
    output:
        check=RESULTS.golden(MODEL, PRECISION, LAYERS, BACKEND),
        speed=RESULTS.speed(MODEL, PRECISION, LAYERS, BACKEND),
    log:
        log_of("golden", MODEL, PRECISION, BACKEND, LAYERS),
    conda:
        "../../envs/engine.yaml"
    threads: 16  # lowered to all the cores given: a speed is measured alone
    resources:
        **GPU_MODEL,
        mem_mb=memory("golden"),
        runtime=minutes("golden"),
        gpu=gpus_of_ranks,
    params:
        **OF_DEVICE,
        options=options_of("golden"),
        python=interpreter,
        key=key_of("golden"),
    message:
        "Golden check of {wildcards.model} in {wildcards.precision} on {wildcards.backend}, layers: {wildcards.layers}"
    script:
        "../scripts/stage.py"
