"""The checks: graphs, engines and golden outputs against their references; `bisect` finds the faulty part."""
