# Each engine compared with its graph as it is written, in ONNX Runtime and Polygraphy.


rule compare:
    input:
        assembly="<results>/{model}/{precision}/graphs/assembly.json",
        weights="<results>/{model}/{precision}/weights.json",
        engines="<results>/{model}/{precision}/engines/{backend}/engines.json",
    output:
        "<results>/{model}/{precision}/compare/{backend}.json",
    log:
        "<results>/logs/compare/{model}/{precision}/{backend}.log",
    benchmark:
        "<results>/benchmarks/compare/{model}/{precision}/{backend}.tsv"
    conda:
        "../../envs/engine.yaml"
    threads: compute_threads
    resources:
        **GPU_MODEL,
        mem_mb=memory(2500, 4),
        runtime=minutes(60, 20),
        gpu=gpus,
    params:
        tolerance=of_config("tolerance"),
        engine_limits=of_config("engine_limits"),
        seconds=of_config("seconds"),
        seed=of_config("seed"),
        device=of_config("device"),
        stage=stage_of("compare"),
    script:
        SCRIPTS["stage"]
