"""The checks: graphs, engines and golden outputs against their references, and what tells where they part."""
