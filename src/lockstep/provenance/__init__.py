"""Built again, and proven: how each artefact was made (`record`), what it must be (`lockfile`), and whether it still is
(`verify`)."""
