# What the model says in Hugging Face transformers, and whether the engine set says the same.
#
# needs: checkpoint.json for the reference; for the check also weights.json, assembly.json, engines.json
# makes: <model>/reference/<layers>.json and .safetensors, <model>/<precision>/golden/<backend>/<layers>.json and .speed.json


rule reference:
    input:
        checkpoint=RESULTS.checkpoint(MODEL),
    output:
        manifest=RESULTS.reference(MODEL, LAYERS),
        logits=RESULTS.reference(MODEL, LAYERS).with_suffix(".safetensors"),
    log:
        log_of("reference", MODEL, LAYERS),
    conda:
        "../../envs/torch.yaml"
    threads: compute_threads
    params:
        golden=golden_prompts,
        key=KEYS["reference"],
    message:
        "Reference of {wildcards.model} from transformers, layers: {wildcards.layers}"
    script:
        "../scripts/reference.py"


rule golden:
    input:
        assembly=RESULTS.assembly(MODEL, PRECISION),
        weights=RESULTS.weights(MODEL, PRECISION),
        engines=RESULTS.engines(MODEL, PRECISION, BACKEND),
        reference=RESULTS.reference(MODEL, LAYERS),
        logits=RESULTS.reference(MODEL, LAYERS).with_suffix(".safetensors"),
    output:
        check=RESULTS.golden(MODEL, PRECISION, LAYERS, BACKEND),
        speed=RESULTS.speed(MODEL, PRECISION, LAYERS, BACKEND),
    log:
        log_of("golden", MODEL, PRECISION, BACKEND, LAYERS),
    conda:
        "../../envs/engine.yaml"
    threads: 16  # lowered to all the cores given: a speed is measured alone
    resources:
        gpu=gpus,
    params:
        expected=expected_texts,
        tolerance=tolerance,
        limits=CONFIG.limits.model_dump(),
        python=interpreter,
        key=KEYS["golden"],
    message:
        "Golden check of {wildcards.model} in {wildcards.precision} on {wildcards.backend}, layers: {wildcards.layers}"
    script:
        "../scripts/golden.py"
