"""The report: the summary of all targets, and their pages."""
