# All checks of all targets in one place.

# What a run is for: engines, and the reports of their checks. The word names the targets (src/lockstep/stages/rules.py).
CHECKED = dict(
    engines=collected("<results>/{model}/{precision}/engines/{backend}/engines.json", "built"),
    validated=collected("<results>/{model}/{precision}/validate/{layers}.json", "all"),
    quality=collected("<results>/{model}/{precision}/quality/{layers}.json", "bounded"),
    compared=collected("<results>/{model}/{precision}/compare/{backend}.json", "run"),
    golden=collected("<results>/{model}/{precision}/golden/{backend}/{layers}.json", "run"),
    speeds=collected("<results>/{model}/{precision}/golden/{backend}/{layers}.speed.json", "run"),
    served=collected("<results>/{model}/{precision}/served/{backend}/{layers}.json", "served"),
    adapted=collected("<results>/{model}/{precision}/adapted/{backend}/{layers}.json", "adapted"),
)


rule summary:
    input:
        **CHECKED,
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
        targets=lambda wildcards: plan()["names"],
        not_run=lambda wildcards: plan()["not_run"],
        stage=stage_of("summary"),
    script:
        SCRIPTS["summary"]
