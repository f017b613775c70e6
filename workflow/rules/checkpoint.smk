# Which bytes: the checkpoint's files, and its tensors in each precision.
#
# needs: for each model a checkpoint folder, a GGUF file, a name on the hub, or a config.json for random weights (SOURCES)
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


rule make_checkpoint:
    input:
        # A GGUF file, or the config.json of random weights.
        path=lambda wildcards: display_paths([SOURCES[wildcards.model]]),
        tokenizer=lambda wildcards: display_paths(
            path
            for path in [SOURCES[wildcards.model].with_name("tokenizer.json")]
            if path.is_file() and KINDS[wildcards.model] is RandomSource
        ),
        nothing=recovered,
    output:
        output_of("make_checkpoint"),
    log:
        log_of("make_checkpoint", MODEL),
    wildcard_constraints:
        model=names_pattern(MADE),
    conda:
        "../../envs/torch.yaml"
    resources:
        mem_mb=memory("make_checkpoint"),
        runtime=minutes("make_checkpoint"),
    params:
        options=options_of("make_checkpoint"),
        key=key_of("make_checkpoint"),
    message:
        "Make the checkpoint of {wildcards.model}"
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
