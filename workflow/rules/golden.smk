# The answers of the model in Hugging Face transformers, and whether the engine set gives the same.


rule reference:
    input:
        checkpoint="<results>/{model}/checkpoint.json",
    output:
        manifest="<results>/{model}/reference/{layers}.json",
        logits="<results>/{model}/reference/{layers}.safetensors",
    log:
        "<results>/logs/reference/{model}/{layers}.log",
    benchmark:
        "<results>/benchmarks/reference/{model}/{layers}.tsv"
    conda:
        "../../envs/torch.yaml"
    threads: compute_threads
    resources:
        mem_mb=memory(2500, 4),
        runtime=minutes(60, 20),
    params:
        golden=of_config("golden"),
        perplexity_text=of_config("perplexity_text"),
        stage=stage_of("reference"),
    script:
        SCRIPTS["stage"]


rule quantized_reference:
    input:
        checkpoint="<results>/{model}/checkpoint.json",
        weights="<results>/{model}/{precision}/weights.json",
    output:
        manifest="<results>/{model}/{precision}/reference/{layers}.json",
        logits="<results>/{model}/{precision}/reference/{layers}.safetensors",
        quantization_error="<results>/{model}/{precision}/reference/{layers}.quantization_error.json",
    log:
        "<results>/logs/quantized_reference/{model}/{precision}/{layers}.log",
    benchmark:
        "<results>/benchmarks/quantized_reference/{model}/{precision}/{layers}.tsv"
    conda:
        "../../envs/torch.yaml"
    threads: compute_threads
    resources:
        mem_mb=memory(2500, 8),
        runtime=minutes(60, 30),
    params:
        golden=of_config("golden"),
        perplexity_text=of_config("perplexity_text"),
        stage=stage_of("quantized_reference"),
    script:
        SCRIPTS["stage"]


rule quality:
    input:
        reference="<results>/{model}/{precision}/reference/{layers}.json",
    output:
        "<results>/{model}/{precision}/quality/{layers}.json",
    log:
        "<results>/logs/quality/{model}/{precision}/{layers}.log",
    benchmark:
        "<results>/benchmarks/quality/{model}/{precision}/{layers}.tsv"
    localrule: True
    conda:
        "../../envs/report.yaml"
    params:
        max_perplexity_change=of_config("max_perplexity_change"),
        stage=stage_of("quality"),
    script:
        SCRIPTS["stage"]


rule golden:
    input:
        assembly="<results>/{model}/{precision}/graphs/assembly.json",
        weights="<results>/{model}/{precision}/weights.json",
        engines="<results>/{model}/{precision}/engines/{backend}/engines.json",
        reference=branch(
            is_quantized,
            then="<results>/{model}/{precision}/reference/{layers}.json",
            otherwise="<results>/{model}/reference/{layers}.json",
        ),
        logits=branch(
            is_quantized,
            then="<results>/{model}/{precision}/reference/{layers}.safetensors",
            otherwise="<results>/{model}/reference/{layers}.safetensors",
        ),
    output:
        check="<results>/{model}/{precision}/golden/{backend}/{layers}.json",
        speed="<results>/{model}/{precision}/golden/{backend}/{layers}.speed.json",
    log:
        "<results>/logs/golden/{model}/{precision}/{backend}/{layers}.log",
    benchmark:
        "<results>/benchmarks/golden/{model}/{precision}/{backend}/{layers}.tsv"
    conda:
        "../../envs/engine.yaml"
    threads: 16  # lowered to all the cores given: a speed is measured alone
    resources:
        **GPU_MODEL,
        mem_mb=memory(2500, 4.5),
        runtime=minutes(60, 30),
        gpu=gpus_of_ranks,
    params:
        expected=of_config("expected"),
        tolerance=of_config("tolerance"),
        limits=of_config("limits"),
        device=of_config("device"),
        stage=stage_of("golden"),
    script:
        SCRIPTS["stage"]
