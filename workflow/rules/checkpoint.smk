# Which bytes: the checkpoint's files, and its tensors in each precision.


rule fetch:
    input:
        # Compared with the model's config.json before its weights are downloaded; another config downloads nothing again.
        config=ancient("<results>/config.json"),
    output:
        # Not deleted before: it names the commit that a branch was found at.
        update("<results>/{model}/source.json"),
    log:
        "<results>/logs/fetch/{model}.log",
    benchmark:
        "<results>/benchmarks/fetch/{model}.tsv"
    wildcard_constraints:
        model=of_kind("hub"),
    # Where Snakemake runs: the nodes of a cluster may have no network.
    localrule: True
    conda:
        "../../envs/fetch.yaml"
    params:
        source=of_config("source"),
        stage=stage_of("fetch"),
    script:
        SCRIPTS["fetch"]


rule make_checkpoint:
    input:
        # A GGUF file, or the config.json of random weights and its tokenizer.
        path=files_of("path"),
        tokenizer=files_of("tokenizer"),
    output:
        "<results>/{model}/source.json",
    log:
        "<results>/logs/make_checkpoint/{model}.log",
    benchmark:
        "<results>/benchmarks/make_checkpoint/{model}.tsv"
    wildcard_constraints:
        model=of_kind("gguf", "random"),
    conda:
        "../../envs/torch.yaml"
    resources:
        mem_mb=memory(1500),
        runtime=minutes(60, 5),
    params:
        source=of_config("source"),
        stage=stage_of("make_checkpoint"),
    script:
        SCRIPTS["stage"]


rule resolve:
    input:
        fetched=branch(is_brought, then="<results>/{model}/source.json"),
        sides=files_of("sides"),
        weights=files_of("weights"),
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
        source=of_config("source"),
        stage=stage_of("resolve"),
    script:
        SCRIPTS["stage"]


rule architecture:
    input:
        fetched=branch(is_brought, then="<results>/{model}/source.json"),
        sides=files_of("sides"),
        # Their headers alone, of weights that are quantised already.
        weights=files_of("header"),
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
        source=of_config("source"),
        stage=stage_of("architecture"),
    script:
        SCRIPTS["stage"]


rule convert:
    input:
        checkpoint="<results>/{model}/checkpoint.json",
        # The weight inputs of the graphs, for which weights are quantised or rounded.
        assembly=branch(is_rounded, then="<results>/{model}/{precision}/graphs/assembly.json"),
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
        stage=stage_of("convert"),
    script:
        SCRIPTS["stage"]
