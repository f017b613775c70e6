"""Snakemake's side of the package: the plan that the rules read, and the jobs that their scripts run."""
