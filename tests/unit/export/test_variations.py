"""Random variations of configs: each works or is refused with a reason, and none is silently wrong.

`LOCKSTEP_VARIATIONS=SEED:COUNT` says which are run (default: 0:60).
"""

from __future__ import annotations

import os

import pytest
from benchmarks.models import REFUSED, WORKS
from benchmarks.tiny import try_config
from variations import variation

_FIRST, _COUNT = map(int, os.environ.get("LOCKSTEP_VARIATIONS", "0:60").split(":"))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(_FIRST, _FIRST + _COUNT))
def test_a_variation_works_or_is_refused(seed, tmp_path):
    config = variation(seed)
    tried = try_config(config, tmp_path)
    print(seed, config["model_type"], tried["result"], tried.get("reason", ""))
    assert tried["result"] in (WORKS, REFUSED), (config, tried)
    assert "Traceback" not in tried.get("reason", "")
