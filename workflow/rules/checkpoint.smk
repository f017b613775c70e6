# Which bytes: the checkpoint's files, and its tensors in each precision.


rule fetch:
    input:
        # Held against the model's config.json before its weights are downloaded; another config downloads nothing again.
        config=ancient("<results>/config.json"),
    output:
        # Not deleted before: it names the commit that a branch was found at.
        update("<results>/{model}/source.json"),
    log:
        "<results>/logs/fetch/{model}.log",
    benchmark:
        "<results>/benchmarks/fetch/{model}.tsv"
    wildcard_constraints:
        model=of_kind(HubSource),
    # Where Snakemake runs: the nodes of a cluster may have no network.
    localrule: True
    conda:
        "../../envs/fetch.yaml"
    params:
        options=options_of("fetch"),
        key=key_of("fetch"),
    script:
        "../scripts/fetch.py"


rule make_checkpoint:
    input:
        # A GGUF file, or the config.json of random weights and its tokenizer.
        path=lambda wildcards: display_paths([SOURCES[wildcards.model]]),
        tokenizer=tokenizer_beside,
    output:
        "<results>/{model}/source.json",
    log:
        "<results>/logs/make_checkpoint/{model}.log",
    benchmark:
        "<results>/benchmarks/make_checkpoint/{model}.tsv"
    wildcard_constraints:
        model=of_kind(GgufSource, RandomSource),
    conda:
        "../../envs/torch.yaml"
    resources:
        mem_mb=memory(1500),
        runtime=minutes(60, 5),
    params:
        options=options_of("make_checkpoint"),
        key=key_of("make_checkpoint"),
    script:
        "../scripts/make_checkpoint.py"


rule resolve:
    input:
        fetched=fetched,
        sides=lambda wildcards: SIDE_FILES.get(wildcards.model, []),
        weights=lambda wildcards: WEIGHT_FILES.get(wildcards.model, []),
    output:
        "<results>/{model}/checkpoint.json",
    log:
        "<results>/logs/resolve/{model}.log",
    benchmark:
        "<results>/benchmarks/resolve/{model}.tsv"
    conda:
        "../../envs/checkpoint.yaml"
    resources:
        mem_mb=memory(1000),
        runtime=minutes(60, 2),
    params:
        options=options_of("resolve"),
        key=key_of("resolve"),
    script:
        "../scripts/resolve.py"


rule architecture:
    input:
        fetched=fetched,
        sides=lambda wildcards: SIDE_FILES.get(wildcards.model, []),
        # Their headers alone, of weights that are quantised already.
        weights=lambda wildcards: (WEIGHT_FILES[wildcards.model] if wildcards.model in PACKED else []),
    output:
        "<results>/{model}/architecture.json",
    log:
        "<results>/logs/architecture/{model}.log",
    benchmark:
        "<results>/benchmarks/architecture/{model}.tsv"
    conda:
        "../../envs/checkpoint.yaml"
    resources:
        mem_mb=memory(1000),
        runtime=minutes(60),
    params:
        options=options_of("architecture"),
        key=key_of("architecture"),
    script:
        "../scripts/architecture.py"


rule convert:
    input:
        checkpoint="<results>/{model}/checkpoint.json",
        # What weights are quantised for: the weight inputs of the graphs.
        assembly=assembly_if_quantized,
    output:
        "<results>/{model}/{precision}/weights.json",
    log:
        "<results>/logs/convert/{model}/{precision}.log",
    benchmark:
        "<results>/benchmarks/convert/{model}/{precision}.tsv"
    conda:
        "../../envs/checkpoint.yaml"
    resources:
        mem_mb=memory(1000),
        runtime=minutes(60, 5),
    params:
        options=options_of("convert"),
        key=key_of("convert"),
    script:
        "../scripts/convert.py"
