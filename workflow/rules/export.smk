# Graphs without weights, and the proof that they compute what the model computes.
#
# needs: architecture.json; for the proof checkpoint.json and weights.json
# makes: <model>/<precision>/graphs/assembly.json (and the graphs beside it), <model>/<precision>/validate/<layers>.json


rule export:
    input:
        # Not checkpoint.json: other weights for the same model need no new graphs, and so no new engines.
        architecture=RESULTS.architecture(MODEL),
    output:
        RESULTS.assembly(MODEL, PRECISION),
    log:
        log_of("export", MODEL, PRECISION),
    conda:
        "../../envs/torch.yaml"
    params:
        key=KEYS["export"],
    message:
        "Export graphs of {wildcards.model} in {wildcards.precision}"
    script:
        "../scripts/export.py"


rule validate:
    input:
        checkpoint=RESULTS.checkpoint(MODEL),
        weights=RESULTS.weights(MODEL, PRECISION),
        assembly=RESULTS.assembly(MODEL, PRECISION),
    output:
        RESULTS.validation(MODEL, PRECISION, LAYERS),
    log:
        log_of("validate", MODEL, PRECISION, LAYERS),
    conda:
        "../../envs/torch.yaml"
    threads: compute_threads
    params:
        tolerance=tolerance,
        max_seq_len=CONFIG.limits.max_seq_len,
        key=KEYS["validate"],
    message:
        "Validate graphs of {wildcards.model} in {wildcards.precision}, layers: {wildcards.layers}"
    script:
        "../scripts/validate.py"
