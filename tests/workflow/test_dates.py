"""Dates are no content: the same bytes under other dates rerun nothing, other bytes under old dates do."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from checkout import Checkout
from test_locks import TARGET, explained, flip
from test_reruns import MODEL

WEIGHTS = f"resources/{MODEL}/model.safetensors"
AFTER_WEIGHTS = {"resolve", "convert", "compare", "reference", "validate", "golden", "served", "summary", "plots"}


def shuffle_dates(folder: Path) -> None:
    """Give every file a date of the last year, as a copy or an archive that keeps none might."""
    chance = random.Random(7)
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink():
            os.utime(path, ns=(0, chance.randrange(1_740_000_000, 1_760_000_000) * 10**9))


def touch_sources(demo: Checkout) -> None:
    for path in (demo.folder / "resources").rglob("*"):
        os.utime(path)


def touch_scripts(demo: Checkout) -> None:
    for path in (demo.folder / "workflow/scripts").glob("*.py"):
        os.utime(path)


def restore_a_backup(demo: Checkout) -> None:
    """Of the checkpoint, and of a manifest in the middle with its record."""
    results = demo.results / MODEL
    for path in [*(demo.folder / f"resources/{MODEL}").iterdir(), *results.glob("fp16/graphs/assembly*.json")]:
        shutil.copyfile(path, f"{path}.backup")
        os.replace(f"{path}.backup", path)


@pytest.mark.parametrize(
    "act",
    [
        touch_sources,
        pytest.param(touch_scripts, marks=pytest.mark.long),
        pytest.param(restore_a_backup, marks=pytest.mark.long),
        lambda demo: shuffle_dates(demo.folder),
    ],
    ids=["touched files", "touched scripts", "a restored backup", "a copy without dates"],
)
def test_the_same_bytes_under_other_dates_rerun_nothing(demo: Checkout, act) -> None:
    act(demo)
    assert demo.would_run() == Counter()
    assert explained(demo) == {}


def copy_without_dates(demo: Checkout, folder: Path) -> Checkout:
    """A fresh clone with the results alone: nothing of what Snakemake knows of them."""
    fresh = Checkout.make(folder)
    shutil.copytree(demo.results, fresh.results, copy_function=shutil.copyfile)
    shuffle_dates(fresh.results)
    return fresh


def test_results_without_dates_in_a_fresh_clone_rebuild_nothing(finished: Checkout, tmp_path: Path) -> None:
    fresh = copy_without_dates(finished, tmp_path / "checkout")
    assert fresh.would_run() == Counter()
    assert explained(fresh) == {}
    (fresh.results / "report/speed.svg").unlink()
    printed = fresh.finish()
    assert "Plots for the report" in printed and "Summary" not in printed
    assert fresh.would_run() == Counter()
    assert fresh.digests() == finished.digests()


OTHERWISE = {
    "weights": (lambda checkout: flip(checkout.folder / WEIGHTS, -100), AFTER_WEIGHTS),
    "a tolerance": (
        lambda checkout: checkout.edit_config(
            lambda config: config.setdefault("tolerances", {}).update(fp16={"block": 0.09, "logits": 0.09})
        ),
        {"compare", "validate", "golden", "served", "config", "summary", "plots"},
    ),
    "a module": (
        lambda checkout: checkout.append("src/lockstep/verify/golden/check.py", "EDITED = 1\n"),
        {"golden", "served", "summary", "plots"},
    ),
}


@pytest.mark.parametrize(
    "act, rules",
    [pytest.param(*case, id=name, marks=[pytest.mark.long] * (name != "weights")) for name, case in OTHERWISE.items()],
)
def test_what_differs_from_results_in_a_fresh_clone_runs(finished: Checkout, tmp_path: Path, act, rules) -> None:
    """Though Snakemake has no record of its own: those beside the results tell."""
    fresh = copy_without_dates(finished, tmp_path / "checkout")
    act(fresh)
    assert set(fresh.would_run()) == rules
    assert set(explained(fresh)) == rules - {"config", "summary", "plots"}


def test_other_bytes_under_an_old_date_run(demo: Checkout) -> None:
    path = demo.folder / WEIGHTS
    about = path.stat()
    flip(path, -100)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert set(demo.would_run()) == AFTER_WEIGHTS
    assert set(explained(demo, TARGET)) == AFTER_WEIGHTS - {"summary", "plots"}
    assert set(demo.would_run(f"results/{MODEL}/fp16/golden/onnxruntime/2.json")) == {
        "resolve", "convert", "reference", "golden",
    }  # fmt: skip
