# Adapters (LoRA) of a model: which bytes, what transformers says with each, and whether the engine set says the same.
#
# needs: folders that PEFT saved (ADAPTERS), checkpoint.json, weights.json, assembly.json, engines.json
# makes: of models with adapters <model>/adapters.json, <model>/adapted_reference/<layers>.json, where weights are
#        quantised <model>/<precision>/adapted_reference/<layers>.json,
#        <model>/<precision>/adapted/<backend>/<layers>.json


rule fetch_adapters:
    input:
        nothing=recovered,
    output:
        # Not deleted before: the commits that branches were found at lie beside it.
        update(output_of("fetch_adapters")),
    log:
        log_of("fetch_adapters", MODEL),
    wildcard_constraints:
        model=names_pattern(ADAPTERS_ON_HUB),
    # Where Snakemake runs: the nodes of a cluster may have no network.
    localrule: True
    conda:
        "../../envs/fetch.yaml"
    params:
        options=options_of("fetch_adapters"),
        key=key_of("fetch_adapters"),
    message:
        "Fetch the adapters of {wildcards.model} from the hub"
    script:
        "../scripts/stage.py"


rule adapters:
    input:
        **inputs_of("adapters"),
        sources=lambda wildcards: (
            [RESULTS.adapter_sources(wildcards.model)]
            if wildcards.model in ADAPTERS_ON_HUB
            else []
        ),
        files=lambda wildcards: display_paths(
            path
            for folder in adapter_folders_here(wildcards.model)
            for path in sorted(folder.glob("adapter_*"))
        ),
    output:
        output_of("adapters"),
    log:
        log_of("adapters", MODEL),
    conda:
        "../../envs/checkpoint.yaml"
    resources:
        mem_mb=memory("adapters"),
        runtime=minutes("adapters"),
    params:
        options=options_of("adapters"),
        adapters=lambda wildcards: dict(
            zip(
                ADAPTERS[wildcards.model],
                display_paths(ADAPTERS[wildcards.model].values()),
            )
        ),
        key=key_of("adapters"),
    message:
        "Check the adapters of {wildcards.model}"
    script:
        "../scripts/stage.py"


rule adapted_reference:
    input:
        **inputs_of("adapted_reference"),
    output:
        output_of("adapted_reference"),
    log:
        log_of("adapted_reference", MODEL, LAYERS),
    conda:
        "../../envs/torch.yaml"
    threads: compute_threads
    resources:
        mem_mb=memory("adapted_reference"),
        runtime=minutes("adapted_reference"),
    params:
        options=options_of("adapted_reference"),
        key=key_of("adapted_reference"),
    message:
        "Reference of {wildcards.model} with its adapters from transformers, layers: {wildcards.layers}"
    script:
        "../scripts/stage.py"


rule quantized_adapted_reference:
    input:
        **inputs_of("quantized_adapted_reference"),
    output:
        output_of("quantized_adapted_reference"),
    log:
        log_of("quantized_adapted_reference", MODEL, PRECISION, LAYERS),
    conda:
        "../../envs/torch.yaml"
    threads: compute_threads
    resources:
        mem_mb=memory("quantized_adapted_reference"),
        runtime=minutes("quantized_adapted_reference"),
    params:
        options=options_of("quantized_adapted_reference"),
        key=key_of("quantized_adapted_reference"),
    message:
        "Reference of {wildcards.model} in {wildcards.precision} with its adapters, layers: {wildcards.layers}"
    script:
        "../scripts/stage.py"


rule adapted:
    input:
        **inputs_of("adapted"),
    output:
        output_of("adapted"),
    log:
        log_of("adapted", MODEL, PRECISION, BACKEND, LAYERS),
    conda:
        "../../envs/engine.yaml"
    threads: compute_threads
    resources:
        **GPU_MODEL,
        mem_mb=memory("adapted"),
        runtime=minutes("adapted"),
        gpu=gpus_of_ranks,
    params:
        **OF_DEVICE,
        options=options_of("adapted"),
        python=interpreter,
        key=key_of("adapted"),
    message:
        "Adapters of {wildcards.model} in {wildcards.precision} on {wildcards.backend}, layers: {wildcards.layers}"
    script:
        "../scripts/stage.py"
