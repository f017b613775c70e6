"""The stages of the workflow, and how one runs."""
