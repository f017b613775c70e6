# All checks of all targets in one place.
#
# needs: engines.json, validations, comparisons, golden checks, server checks and speeds of all targets
# makes: results/summary.json and .csv, results/report/index.html with a page of each target in targets/, and the plots


rule summary:
    input:
        validations=made_by("validate"),
        engines=made_by("build"),
        comparisons=made_by("compare"),
        goldens=made_by("golden"),
        servers=made_by("served"),
        adapted=made_by("adapted"),
        speeds=SPEEDS,
    output:
        RESULTS.summary(),
        RESULTS.summary().with_suffix(".csv"),
        report(
            RESULTS.report_page(),
            caption="../report/targets.rst",
            category="Summary",
            labels={"figure": "Verdict and targets"},
        ),
        # One output, not one a target: Snakemake keeps the list of all inputs with each output.
        report(
            directory(RESULTS.target_pages()),
            patterns=[PAGE],
            caption="../report/target.rst",
            category="Targets",
            labels={name: f"{{{name}}}" for name in WILDCARDS},
        ),
    log:
        log_of("summary"),
    localrule: True
    conda:
        "../../envs/report.yaml"
    params:
        targets=[str(target) for target in TARGETS],
        not_run=NOT_RUN,
        key=KEYS["summary", None],
    message:
        "Summary of all targets"
    script:
        "../scripts/summary.py"


rule plots:
    input:
        summary=RESULTS.summary(),
        validations=made_by("validate"),
    output:
        errors=report(
            RESULTS.report("error_by_layer.svg"),
            caption="../report/error_by_layer.rst",
            category="Summary",
            labels={"figure": "Error by layer"},
        ),
        speed=report(
            RESULTS.report("speed.svg"),
            caption="../report/speed.rst",
            category="Summary",
            labels={"figure": "Tokens per second"},
        ),
    log:
        log_of("plots"),
    localrule: True
    conda:
        "../../envs/report.yaml"
    params:
        key=KEYS["plots", None],
    message:
        "Plots for the report"
    script:
        "../scripts/plots.py"
