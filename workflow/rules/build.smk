# The engine set of one assembly on one backend. It holds no weights and no layer count.
#
# needs: graphs/assembly.json
# makes: <model>/<precision>/engines/<backend>/engines.json (and the engines beside it)


rule build:
    input:
        **inputs_of("build"),
    output:
        # Not deleted before: engines that still fit are kept.
        update(RESULTS.engines(MODEL, PRECISION, BACKEND)),
    log:
        log_of("build", MODEL, PRECISION, BACKEND),
    conda:
        "../../envs/engine.yaml"
    resources:
        **GPU_MODEL,
        mem_mb=memory("build"),
        runtime=minutes("build"),
        gpu=gpus,
    params:
        **OF_DEVICE,
        options=options_of("build"),
        python=interpreter,
        key=key_of("build"),
    message:
        "Build engines of {wildcards.model} in {wildcards.precision} for {wildcards.backend}"
    script:
        "../scripts/stage.py"
