"""The checks of the demo's lock in this repository are those of the config here. Bytes and tokens are held by the runs
of tests/workflow/test_committed_lock.py and .ci/run; a changed tolerance is seen here, in a second."""

from __future__ import annotations

import json
from pathlib import Path

from demo_model import CONFIG, ROOT

from lockstep.config.backends import backends
from lockstep.provenance.lock import PARAMETERS, Lock, locked_parameters, parameters_place
from lockstep.provenance.locked import not_in_config
from lockstep.stages import STAGES, jobs

LOCK_FILE = ROOT / "locks" / "demo-llama.lock.json"
LOCK = Lock.load(LOCK_FILE)


def test_the_terms_of_each_check_are_what_is_locked() -> None:
    """Of every target of the config, whether or not it runs on this machine."""
    locked = {place: items for place, items in LOCK.entries.items() if place.startswith(f"{PARAMETERS}/")}
    of_config = {}
    for target in CONFIG.targets():
        for stage in STAGES.values():
            if stage.is_check:
                names = {name: vars(target)[name] for name in stage.wildcards}
                of_config[parameters_place(stage.name, names)] = locked_parameters(stage.options(CONFIG, names))
    assert {place: of_config.get(place) for place in locked} == locked, "see test_committed_lock.py"


def test_each_check_that_a_machine_without_a_gpu_makes_is_locked() -> None:
    """A target that is added is locked in the same commit."""
    on_host = [target for target in CONFIG.targets() if not backends()[target.backend].gpus]
    places = {
        parameters_place(job.stage, job.names) for job in jobs(CONFIG, Path(), on_host) if STAGES[job.stage].is_check
    }
    assert on_host and places <= LOCK.entries.keys()


def test_what_the_config_says_to_a_job_is_plain_json() -> None:
    """Else `explain` would find a list in the record where the config has a tuple."""
    for job in jobs(CONFIG, Path(), CONFIG.targets()):
        assert job.options == json.loads(json.dumps(job.options)), job


def test_targets_of_a_lock_that_a_config_lacks_are_named() -> None:
    first, *other_targets = targets = CONFIG.targets()
    assert not_in_config(LOCK_FILE, targets) == []
    assert not_in_config(LOCK_FILE, other_targets) == [f"{first.precision}/{first.layers}/{first.backend}"]
