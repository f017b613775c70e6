# All checks of all targets in one place.


rule summary:
    input:
        engines=made_by("build"),
        checks=[path for name, stage in STAGES.items() if stage.is_judged for path in made_by(name)],
        speeds=[
            str(STAGES["golden"].path(job, STAGES["golden"].beside["speed"])) for job in JOBS if job.stage == "golden"
        ],
    output:
        "<results>/summary.json",
        "<results>/summary.csv",
        report(
            "<results>/report/index.html",
            caption="../report/targets.rst",
            category="Summary",
            labels={"figure": "Verdict and targets"},
        ),
        # One output, not one a target: Snakemake keeps the list of all inputs with each output.
        report(
            directory("<results>/report/targets"),
            patterns=[PAGE],
            caption="../report/target.rst",
            category="Targets",
            labels={name: f"{{{name}}}" for name in CONSTRAINTS},
        ),
    log:
        "<results>/logs/summary.log",
    benchmark:
        "<results>/benchmarks/summary.tsv"
    localrule: True
    conda:
        "../../envs/report.yaml"
    params:
        targets=[str(target) for target in TARGETS],
        not_run=NOT_RUN,
        key=stage_key("report.renew"),
    script:
        "../scripts/summary.py"
