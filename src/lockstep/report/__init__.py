"""What people look at: the summary of all targets, the report's table and plots."""
