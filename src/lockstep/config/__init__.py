"""The config: its schema, how it is loaded, what is said of a mistake, the pages made from it."""
