# Which bytes: the checkpoint's files, and its tensors in each precision.
#
# needs: for each model a checkpoint folder, a name on the hub, or a config.json for random weights (SOURCES)
# makes: results/config.json, <model>/source.json (of models that are fetched or made, with checkpoint/ beside it),
#        <model>/checkpoint.json and architecture.json (the same without weights),
#        <model>/<precision>/weights.json (and weights.safetensors where it casts)


rule config:
    input:
        recovered,
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


rule fetch:
    input:
        # Held against the model's config.json before its weights are downloaded; another config downloads nothing again.
        config=ancient(RESULTS.config()),
        nothing=recovered,
    output:
        # Not deleted before: it names the commit that a branch was found at.
        update(RESULTS.source(MODEL)),
    log:
        log_of("fetch", MODEL),
    wildcard_constraints:
        model=names_pattern(ON_HUB),
    # Where Snakemake runs: the nodes of a cluster may have no network.
    localrule: True
    conda:
        "../../envs/fetch.yaml"
    params:
        options=options_of("fetch"),
        key=key_of("fetch"),
    message:
        "Fetch {wildcards.model} from the hub"
    script:
        "../scripts/stage.py"


rule random_weights:
    input:
        config=lambda wildcards: display_paths([SOURCES[wildcards.model]]),
        tokenizer=lambda wildcards: display_paths(
            path
            for path in [SOURCES[wildcards.model].with_name("tokenizer.json")]
            if path.is_file()
        ),
        nothing=recovered,
    output:
        output_of("random_weights"),
    log:
        log_of("random_weights", MODEL),
    wildcard_constraints:
        model=names_pattern(RANDOM),
    conda:
        "../../envs/torch.yaml"
    resources:
        mem_mb=memory("random_weights"),
        runtime=minutes("random_weights"),
    params:
        options=options_of("random_weights"),
        key=key_of("random_weights"),
    message:
        "Make random weights for {wildcards.model}"
    script:
        "../scripts/stage.py"


rule resolve:
    input:
        nothing=recovered,
        fetched=fetched,
        sides=lambda wildcards: SIDE_FILES.get(wildcards.model, []),
        weights=lambda wildcards: WEIGHT_FILES.get(wildcards.model, []),
    output:
        output_of("resolve"),
    log:
        log_of("resolve", MODEL),
    conda:
        "../../envs/checkpoint.yaml"
    resources:
        mem_mb=memory("resolve"),
        runtime=minutes("resolve"),
    params:
        options=options_of("resolve"),
        key=key_of("resolve"),
    message:
        "Resolve {wildcards.model}"
    script:
        "../scripts/stage.py"


rule architecture:
    input:
        nothing=recovered,
        fetched=fetched,
        sides=lambda wildcards: SIDE_FILES.get(wildcards.model, []),
        # Their headers alone, of weights that are quantised already.
        weights=lambda wildcards: (
            WEIGHT_FILES[wildcards.model] if wildcards.model in PACKED else []
        ),
    output:
        output_of("architecture"),
    log:
        log_of("architecture", MODEL),
    conda:
        "../../envs/checkpoint.yaml"
    resources:
        mem_mb=memory("architecture"),
        runtime=minutes("architecture"),
    params:
        options=options_of("architecture"),
        key=key_of("architecture"),
    message:
        "Resolve the architecture of {wildcards.model}"
    script:
        "../scripts/stage.py"


rule convert:
    input:
        **inputs_of("convert"),
    output:
        output_of("convert"),
    log:
        log_of("convert", MODEL, PRECISION),
    conda:
        "../../envs/checkpoint.yaml"
    resources:
        mem_mb=memory("convert"),
        runtime=minutes("convert"),
    params:
        options=options_of("convert"),
        key=key_of("convert"),
    message:
        "Convert the weights of {wildcards.model} to {wildcards.precision}"
    script:
        "../scripts/stage.py"
