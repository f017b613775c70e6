"""The config: its schema, loading, error messages, and the pages made from it."""
