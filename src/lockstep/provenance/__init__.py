"""Records, locks and proofs of what was built.

How each artefact was made (`record`), what it must be (`lock`, `lockfile`), and whether it still is (`verify`).
"""
