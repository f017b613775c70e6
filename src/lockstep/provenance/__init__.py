"""Statements and locks of what was built.

How each artefact was made (`statements`), what it must be (`lock`, `lockfile`), and whether it still is (`verify`).
"""
