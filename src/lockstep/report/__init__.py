"""The report: the summary of all targets, their pages and plots."""
