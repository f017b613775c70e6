"""Statements and locks of artefacts.

How each artefact was made (`statements`), its locked digest (`lock`), and whether it matches (`verify`).
"""
