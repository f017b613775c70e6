"""One cache under several checkouts: what one has made the others take, and get the same bytes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from checkout import Checkout
from shared_cache import entries, verify

from lockstep.artifacts.files import sha256_file
from lockstep.provenance.cache import Cache

MODEL = "demo-llama"
# Artefacts made of weights and graphs.
MADE = {"convert": ["fp32"], "export": ["fp32"], "build": ["fp32/onnxruntime"], "reference": ["2", "all"]}
TARGETS = [
    f"results/{MODEL}/{name}"
    for name in (
        "fp32/weights.json",
        "fp32/engines/onnxruntime/engines.json",
        "reference/2.json",
        "reference/all.json",
        "fp32/validate/all.json",
        "fp32/golden/onnxruntime/all.json",
    )
]


class Sharing(Checkout):
    """A checkout whose user has set LOCKSTEP_CACHE."""

    cache: Path

    @classmethod
    def at(cls, folder: Path, cache: Path) -> Sharing:
        checkout = cls.make(folder)
        checkout.cache = cache
        return checkout

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "LOCKSTEP_CACHE": str(self.cache)}


def log_of(checkout: Checkout, stage: str, name: str) -> str:
    return (checkout.results / "logs" / stage / MODEL / f"{name}.log").read_text()


@pytest.mark.long
def test_a_second_checkout_builds_nothing(first_run: Checkout, filled_cache: Path, tmp_path: Path) -> None:
    for stage, names in MADE.items():
        for name in names:
            assert (f"cache: {stage} {MODEL}/{name} is put into {filled_cache}, build key ") in log_of(
                first_run, stage, name
            )
    num_entries = Counter(entry.key.stage for entry in entries(Cache(filled_cache)))
    assert num_entries == {stage: len(names) for stage, names in MADE.items()}
    before = digests(filled_cache)

    second = Sharing.at(tmp_path / "elsewhere" / "deeper" / "second", filled_cache)
    second.finish(*TARGETS)
    for stage, names in MADE.items():
        for name in names:
            line = f"cache: {stage} {MODEL}/{name} is taken from {filled_cache}, build key "
            assert log_of(second, stage, name).startswith(line), "and says nothing else, for nothing else was done"
            assert len(log_of(second, stage, name).splitlines()) == 1
    assert [log_of(second, *check) for check in (("validate", "fp32/all"), ("golden", "fp32/onnxruntime/all"))] == [
        "",
        "",
    ], "checks run"
    digests_there = second.digests()
    assert len(digests_there) > 30 and digests_there.items() <= first_run.digests().items(), "statements too"
    second.call("lockstep", "verify", "--deep")
    assert not second.would_run("--cores", "1", *TARGETS), "and there is nothing left to do"
    assert digests(filled_cache) == before and verify(Cache(filled_cache)) == []
    for checkout in (first_run, second):
        assert not holding(checkout.results, str(filled_cache)) and not holding(filled_cache, str(checkout.folder)), (
            "places are part of nothing that is kept"
        )


def test_one_job_takes_it_too(finished: Checkout, filled_cache: Path, fresh: Checkout) -> None:
    fresh.edit_config(lambda config: config.update(cache=str(filled_cache)))
    for stage in ("resolve", "architecture"):
        fresh.job(stage, f"{MODEL}/fp32")
    process = fresh.job("export", f"{MODEL}/fp32")
    assert process.stdout == f"results/{MODEL}/fp32/graphs/assembly.json\n" and "is taken from" in process.stderr
    assert fresh.digests().items() <= finished.digests().items()


def digests(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in folder.rglob("*") if path.is_file()}


def holding(folder: Path, text: str) -> list[Path]:
    """Files below `folder` that hold `text`, logs left out."""
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and "logs" not in path.relative_to(folder).parts and text.encode() in path.read_bytes()
    ]


def test_a_cache_that_is_a_file_is_one_line_before_any_job(fresh: Checkout, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    process = fresh.call("snakemake", "--cores", "1", "--config", f"cache={tmp_path / 'file'}", check=False)
    assert process.returncode == 2 and not fresh.results.exists()
    line = process.stderr.splitlines()[-1]
    assert line.startswith("lockstep: error: config: cache: expected a folder, ")
    assert (f"found that {tmp_path / 'file'} is a file") in line
    assert "Traceback" not in process.stderr
