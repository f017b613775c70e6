# Graphs without weights, and the proof that they compute what the model computes.
#
# needs: architecture.json; for the proof checkpoint.json and weights.json
# makes: <model>/<precision>/graphs/assembly.json (and the graphs beside it), <model>/<precision>/validate/<layers>.json


rule export:
    input:
        # Not checkpoint.json: other weights for the same model need no new graphs, and so no new engines.
        **inputs_of("export"),
    output:
        output_of("export"),
    log:
        log_of("export", MODEL, PRECISION),
    conda:
        "../../envs/torch.yaml"
    resources:
        mem_mb=memory("export"),
        runtime=minutes("export"),
    params:
        options=options_of("export"),
        key=key_of("export"),
    message:
        "Export graphs of {wildcards.model} in {wildcards.precision}"
    script:
        "../scripts/stage.py"


rule validate:
    input:
        **inputs_of("validate"),
    output:
        RESULTS.validation(MODEL, PRECISION, LAYERS),
    log:
        log_of("validate", MODEL, PRECISION, LAYERS),
    conda:
        "../../envs/torch.yaml"
    threads: compute_threads
    resources:
        mem_mb=memory("validate"),
        runtime=minutes("validate"),
    params:
        options=options_of("validate"),
        key=key_of("validate"),
    message:
        "Validate graphs of {wildcards.model} in {wildcards.precision}, layers: {wildcards.layers}"
    script:
        "../scripts/stage.py"
