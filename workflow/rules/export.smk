# Graphs without weights, and the proof that they compute what the model computes.
#
# needs: checkpoint.json; for the proof also weights.json
# makes: <model>/<precision>/graphs/assembly.json (and the graphs beside it), <model>/<precision>/validate/<layers>.json


rule export:
    input:
        # Ancient, because only the architecture is read: other weights of the same shapes need no new graphs, and no new engines.
        checkpoint=ancient(RESULTS.checkpoint(MODEL)),
    output:
        RESULTS.assembly(MODEL, PRECISION),
    log:
        log_of("export", MODEL, PRECISION),
    conda:
        "../../envs/torch.yaml"
    params:
        architecture=lambda wildcards: ARCHITECTURES[wildcards.model],
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
        report(
            RESULTS.validation(MODEL, PRECISION, LAYERS),
            caption="../report/validation.rst",
            category="Validation of graphs",
            labels={"model": MODEL, "precision": PRECISION, "layers": LAYERS},
        ),
    log:
        log_of("validate", MODEL, PRECISION, LAYERS),
    conda:
        "../../envs/torch.yaml"
    threads: compute_threads
    params:
        tolerance=tolerance,
        key=KEYS["validate"],
    message:
        "Validate graphs of {wildcards.model} in {wildcards.precision}, layers: {wildcards.layers}"
    script:
        "../scripts/validate.py"
