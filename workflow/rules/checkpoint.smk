# Which bytes: the checkpoint's files, and its tensors in each precision.
#
# needs: a local checkpoint folder for each model (SOURCES)
# makes: results/config.json, <model>/checkpoint.json and architecture.json (the same without weights),
#        <model>/<precision>/weights.json (and weights.safetensors where it casts)


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
        sides=lambda wildcards: SIDE_FILES[wildcards.model],
        weights=lambda wildcards: WEIGHT_FILES[wildcards.model],
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


rule architecture:
    input:
        sides=lambda wildcards: SIDE_FILES[wildcards.model],
    output:
        RESULTS.architecture(MODEL),
    log:
        log_of("architecture", MODEL),
    conda:
        "../../envs/checkpoint.yaml"
    params:
        source=lambda wildcards: CONFIG.models[wildcards.model].source,
        key=KEYS["resolve"],
    message:
        "Resolve the architecture of {wildcards.model}"
    script:
        "../scripts/architecture.py"


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
