# Which bytes: the checkpoint's files, and its tensors in each precision.
#
# needs: a local checkpoint folder for each model (SOURCES)
# makes: results/config.json, <model>/checkpoint.json, <model>/<precision>/weights.json (and weights.safetensors where it casts)


rule config:
    output:
        RESULTS.config(),
    log:
        log_of("config"),
    localrule: True
    conda:
        "../../envs/checkpoint.yaml"
    params:
        config=CONFIG.dump(),
    message:
        "Config as it is used"
    script:
        "../scripts/config.py"


rule resolve:
    input:
        checkpoint_of,
    output:
        RESULTS.checkpoint(MODEL),
    log:
        log_of("resolve", MODEL),
    conda:
        "../../envs/checkpoint.yaml"
    params:
        source=lambda wildcards: CONFIG.models[wildcards.model].source,
        key=KEYS["resolve"],
    message:
        "Resolve {wildcards.model}"
    script:
        "../scripts/resolve.py"


rule convert:
    input:
        checkpoint=RESULTS.checkpoint(MODEL),
    output:
        RESULTS.weights(MODEL, PRECISION),
    log:
        log_of("convert", MODEL, PRECISION),
    conda:
        "../../envs/checkpoint.yaml"
    params:
        key=KEYS["convert"],
    message:
        "Convert the weights of {wildcards.model} to {wildcards.precision}"
    script:
        "../scripts/convert.py"
