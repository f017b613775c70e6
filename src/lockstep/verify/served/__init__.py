"""The check of a server on an engine set."""
