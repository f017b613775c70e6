# Adapters (LoRA) of a model: their bytes, transformers' answers with each, and whether the engine set gives the same.


rule fetch_adapters:
    output:
        # Not deleted before the job: next to it lie the commits that branches were at.
        update("<results>/{model}/adapter_sources.json"),
    log:
        "<results>/logs/fetch_adapters/{model}.log",
    benchmark:
        "<results>/benchmarks/fetch_adapters/{model}.tsv"
    # Where Snakemake runs: the nodes of a cluster may have no network.
    localrule: True
    conda:
        "../../envs/fetch.yaml"
    params:
        hub_adapters=of_config("hub_adapters"),
        stage=stage_of("fetch_adapters"),
    script:
        SCRIPTS["stage"]


rule adapters:
    input:
        checkpoint="<results>/{model}/checkpoint.json",
        fetched=branch(is_any_adapter_on_the_hub, then="<results>/{model}/adapter_sources.json"),
        files=files_of("adapters"),
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
        sources=of_config("sources"),
        max_lora_rank=of_config("max_lora_rank"),
        lora_target_modules=of_config("lora_target_modules"),
        stage=stage_of("adapters"),
        folders=files_of("folders"),
    script:
        SCRIPTS["stage"]


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
        adapted_golden=of_config("adapted_golden"),
        stage=stage_of("adapted_reference"),
    script:
        SCRIPTS["stage"]


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
        adapted_golden=of_config("adapted_golden"),
        stage=stage_of("quantized_adapted_reference"),
    script:
        SCRIPTS["stage"]


rule adapted:
    input:
        assembly="<results>/{model}/{precision}/graphs/assembly.json",
        weights="<results>/{model}/{precision}/weights.json",
        engines="<results>/{model}/{precision}/engines/{backend}/engines.json",
        adapters="<results>/{model}/adapters.json",
        adapted_reference=branch(
            is_quantized,
            then="<results>/{model}/{precision}/adapted_reference/{layers}.json",
            otherwise="<results>/{model}/adapted_reference/{layers}.json",
        ),
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
        adapted_expected=of_config("adapted_expected"),
        tolerance=of_config("tolerance"),
        limits=of_config("limits"),
        device=of_config("device"),
        stage=stage_of("adapted"),
    script:
        SCRIPTS["stage"]
