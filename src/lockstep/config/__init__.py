"""The config: its schema, loading, error messages, the pages made from it, and what the files of a source say."""
