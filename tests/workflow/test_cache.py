"""One cache under several checkouts: what one has made the others take, and get the same bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from checkout import Checkout

from lockstep.cache.store import Cache
from lockstep.cache.upkeep import look, verify

MODEL = "demo-llama"
# What is made of weights and graphs; fp16 is the checkpoint's own precision, so that its weights are not copied.
MADE = {"convert": ["fp32"], "export": ["fp16", "fp32"], "build": ["fp16/onnxruntime", "fp32/onnxruntime"], "reference": ["2", "all"]}
TARGETS = [f"results/{MODEL}/{name}" for name in (
    "fp32/weights.json", "fp16/weights.json", "fp32/engines/onnxruntime/engines.json", "fp16/engines/onnxruntime/engines.json",
    "reference/2.json", "reference/all.json",
)]  # fmt: skip


class Sharing(Checkout):
    """A checkout whose user has set LOCKSTEP_CACHE."""

    cache: Path | None = None

    def environment(self) -> dict[str, str]:
        return super().environment() | ({"LOCKSTEP_CACHE": str(self.cache)} if self.cache else {})

    @classmethod
    def at(cls, folder: Path, cache: Path | None) -> Sharing:
        checkout = cls.make(folder)
        checkout.cache = cache
        return checkout

    def said(self, stage: str, name: str) -> str:
        return (self.results / "logs" / stage / MODEL / f"{name}.log").read_text()


def test_a_second_checkout_builds_nothing(finished: Checkout, tmp_path: Path) -> None:
    cache = tmp_path / "shared" / "cache"
    first = Sharing.at(tmp_path / "first", cache)
    first.finish(*TARGETS)
    assert all("is put into" in first.said(stage, name) for stage, names in MADE.items() for name in names)
    assert [used.entry.made_of["stage"] for used in look(Cache(cache)).entries] == [stage for stage in sorted(MADE) for _ in MADE[stage]]

    second = Sharing.at(tmp_path / "elsewhere" / "deeper" / "second", None)
    second.edit_config(lambda config: config.update(cache=str(cache)))
    second.finish()
    for stage, names in MADE.items():
        for name in names:
            assert f"cache: {stage} {MODEL}/{name} is taken from {cache}, build key " in second.said(stage, name)
    assert second.said("convert", "fp16") == "", "it names files of its own checkout: made here, in no time, and not shared"
    assert all(log.read_text() == "" for stage in ("validate", "golden") for log in (second.results / "logs" / stage).rglob("*.log")), "checks run"
    assert second.digests() == finished.digests()
    second.run("lockstep", "lock")
    second.run("lockstep", "verify", "--deep")
    assert not second.would_run(), "and another run has nothing to do"

    assert verify(Cache(cache)) == []
    for place in (tmp_path, cache):
        assert not holding(second.results, str(place)) and not holding(cache, str(place)), "places are part of nothing that is kept"

    by_hand = Sharing.at(tmp_path / "third", cache)
    by_hand.run("lockstep", "resolve")
    process = by_hand.run("lockstep", "export", f"{MODEL}/fp32")
    assert process.stdout == f"results/{MODEL}/fp32/graphs/assembly.json\n" and "is taken from" in process.stderr
    assert by_hand.digests().items() <= finished.digests().items()


def holding(folder: Path, text: str) -> list[Path]:
    """Files below `folder` that hold `text`, logs left out."""
    return [path for path in folder.rglob("*") if path.is_file() and "logs" not in path.relative_to(folder).parts and text.encode() in path.read_bytes()]


def test_a_cache_that_is_a_file_is_one_line_before_any_job(fresh: Checkout, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    process = fresh.snakemake("--cores", "1", "--config", f"cache={tmp_path / 'file'}", check=False)
    assert process.returncode == 2 and not fresh.results.exists()
    assert process.stderr.splitlines()[-1].startswith(f"lockstep: error: config: cache: expected a folder, or a path where one can be made, found that {tmp_path / 'file'} is a file")
    assert "Traceback" not in process.stderr


@pytest.mark.long
def test_two_machines_fill_one_cache_at_once(finished: Checkout, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    checkouts = [Sharing.at(tmp_path / name, cache) for name in ("one", "other")]
    runs = [
        subprocess.Popen([sys.executable, "-m", "snakemake", "--cores", "1"], cwd=checkout.folder, env=checkout.environment(),
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for checkout in checkouts
    ]  # fmt: skip
    assert [run.wait() for run in runs] == [0, 0]
    assert [checkout.digests() for checkout in checkouts] == [finished.digests()] * 2
    assert verify(Cache(cache)) == []
