from pathlib import Path

import pytest

from lockstep.targets import Results
from shared import Shared


@pytest.fixture(scope="session")
def hypotheses(references: Results, shared: Shared) -> Path:
    """Return the hypotheses on an endpoint of the demo, of few questions. Read only."""
    from lockstep.certify.tables import make_hypotheses  # loads torch

    def make(folder: Path) -> None:
        checkpoint = references.checkpoint("demo-llama")
        make_hypotheses(checkpoint, references.reference("demo-llama", "all"), folder / "all.json", completions=60)

    return shared.folder("hypotheses", make) / "all.json"
