# Adapters (LoRA) of a model: which bytes, what transformers says with each, and whether the engine set says the same.


rule fetch_adapters:
    output:
        # Not deleted before: the commits that branches were found at lie beside it.
        update("<results>/{model}/adapter_sources.json"),
    log:
        "<results>/logs/fetch_adapters/{model}.log",
    benchmark:
        "<results>/benchmarks/fetch_adapters/{model}.tsv"
    wildcard_constraints:
        model=names_pattern(model for model in CONFIG.models if on_hub(CONFIG, model)),
    # Where Snakemake runs: the nodes of a cluster may have no network.
    localrule: True
    conda:
        "../../envs/fetch.yaml"
    params:
        options=options_of("fetch_adapters"),
        key=key_of("fetch_adapters"),
    script:
        "../scripts/fetch_adapters.py"


rule adapters:
    input:
        checkpoint="<results>/{model}/checkpoint.json",
        fetched=fetched_adapters,
        files=adapter_files,
    output:
        "<results>/{model}/adapters.json",
    log:
        "<results>/logs/adapters/{model}.log",
    benchmark:
        "<results>/benchmarks/adapters/{model}.tsv"
    conda:
        "../../envs/checkpoint.yaml"
    resources:
        mem_mb=memory(1000),
        runtime=minutes(60),
    params:
        options=options_of("adapters"),
        key=key_of("adapters"),
        adapters=adapter_folders,
    script:
        "../scripts/adapters.py"


rule adapted_reference:
    input:
        checkpoint="<results>/{model}/checkpoint.json",
        adapters="<results>/{model}/adapters.json",
    output:
        "<results>/{model}/adapted_reference/{layers}.json",
    log:
        "<results>/logs/adapted_reference/{model}/{layers}.log",
    benchmark:
        "<results>/benchmarks/adapted_reference/{model}/{layers}.tsv"
    conda:
        "../../envs/torch.yaml"
    threads: compute_threads
    resources:
        mem_mb=memory(2500, 4),
        runtime=minutes(60, 20),
    params:
        options=options_of("adapted_reference"),
        key=key_of("adapted_reference"),
    script:
        "../scripts/adapted_reference.py"


rule quantized_adapted_reference:
    input:
        checkpoint="<results>/{model}/checkpoint.json",
        weights="<results>/{model}/{precision}/weights.json",
        adapters="<results>/{model}/adapters.json",
    output:
        "<results>/{model}/{precision}/adapted_reference/{layers}.json",
    log:
        "<results>/logs/quantized_adapted_reference/{model}/{precision}/{layers}.log",
    benchmark:
        "<results>/benchmarks/quantized_adapted_reference/{model}/{precision}/{layers}.tsv"
    conda:
        "../../envs/torch.yaml"
    threads: compute_threads
    resources:
        mem_mb=memory(2500, 4),
        runtime=minutes(60, 20),
    params:
        options=options_of("quantized_adapted_reference"),
        key=key_of("quantized_adapted_reference"),
    script:
        "../scripts/quantized_adapted_reference.py"


rule adapted:
    input:
        assembly="<results>/{model}/{precision}/graphs/assembly.json",
        weights="<results>/{model}/{precision}/weights.json",
        engines="<results>/{model}/{precision}/engines/{backend}/engines.json",
        adapters="<results>/{model}/adapters.json",
        adapted_reference=of_precision("adapted_reference"),
    output:
        "<results>/{model}/{precision}/adapted/{backend}/{layers}.json",
    log:
        "<results>/logs/adapted/{model}/{precision}/{backend}/{layers}.log",
    benchmark:
        "<results>/benchmarks/adapted/{model}/{precision}/{backend}/{layers}.tsv"
    conda:
        "../../envs/engine.yaml"
    threads: compute_threads
    resources:
        **GPU_MODEL,
        mem_mb=memory(2500, 4.5),
        runtime=minutes(60, 30),
        gpu=gpus_of_ranks,
    params:
        options=options_of("adapted"),
        device=device,
        key=key_of("adapted"),
    script:
        "../scripts/adapted.py"
