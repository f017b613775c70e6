# Graphs without weights, and the check that they compute the same as the model.


rule export:
    input:
        # Not checkpoint.json: other weights for the same model need no new graphs, and so no new engines.
        architecture="<results>/{model}/architecture.json",
    output:
        "<results>/{model}/{precision}/graphs/assembly.json",
    log:
        "<results>/logs/export/{model}/{precision}.log",
    benchmark:
        "<results>/benchmarks/export/{model}/{precision}.tsv"
    conda:
        "../../envs/torch.yaml"
    resources:
        mem_mb=memory(2000, 0.1),
        runtime=minutes(60),
    params:
        tensor_parallel=of_config("tensor_parallel"),
        adapters=of_config("adapters"),
        group_size=of_config("group_size"),
        head_bits=of_config("head_bits"),
        residual=of_config("residual"),
        activations=of_config("activations"),
        kv_cache_dtype=of_config("kv_cache_dtype"),
        stage=stage_of("export"),
    script:
        SCRIPTS["stage"]


rule validate:
    input:
        checkpoint="<results>/{model}/checkpoint.json",
        weights="<results>/{model}/{precision}/weights.json",
        assembly="<results>/{model}/{precision}/graphs/assembly.json",
    output:
        "<results>/{model}/{precision}/validate/{layers}.json",
    log:
        "<results>/logs/validate/{model}/{precision}/{layers}.log",
    benchmark:
        "<results>/benchmarks/validate/{model}/{precision}/{layers}.tsv"
    conda:
        "../../envs/torch.yaml"
    threads: compute_threads
    resources:
        mem_mb=memory(2500, 8),
        runtime=minutes(60, 20),
    params:
        tolerance=of_config("tolerance"),
        max_seq_len=of_config("max_seq_len"),
        stage=stage_of("validate"),
    script:
        SCRIPTS["stage"]
