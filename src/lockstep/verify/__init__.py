"""The checks: graphs, engines and golden outputs against their references.

And what tells where they part (`bisect`).
"""
