"""A cache in use by others, killed while writing, damaged, on a full disk or read-only: real processes. Each ends with
the results of an undisturbed run, or with a one-line error."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from shared_cache import MB, checkpoint, contents, convert, entries, never, run, start, verify

from lockstep.artifacts.files import dump_json, sha256_json
from lockstep.artifacts.statement import DIGEST, Statement
from lockstep.provenance.cache import Cache
from some import some


@pytest.mark.long
def test_processes_fill_and_read_one_cache_while_another_drops_all_of_it(tmp_path: Path, cache: Cache) -> None:
    manifests = [checkpoint(tmp_path / str(seed), seed, megabytes=2) for seed in range(2)]
    undisturbed = [
        contents(convert(manifest, tmp_path / str(seed) / "undisturbed", "").parent)
        for seed, manifest in enumerate(manifests)
    ]
    pruning = subprocess.Popen([sys.executable, "-c", PRUNE, cache.folder])
    try:
        machines = []
        for (seed, manifest), name in itertools.product(enumerate(manifests), "ab"):
            folders = [tmp_path / f"{seed}-{name}-{round}" for round in range(6)]
            machines.append((seed, folders, start(manifest, cache.folder, *folders)))
        for seed, folders, process in machines:
            stderr = process.communicate()[1]
            assert process.returncode == 0 and "Traceback" not in stderr, stderr
            assert all(contents(folder) == undisturbed[seed] for folder in folders), stderr
        assert pruning.poll() is None, "it deletes all the while"
    finally:
        pruning.kill()
        pruning.wait()
    assert not [line for line in verify(cache) if "sha256" in line], "each file has the digest of its name"
    for seed, manifest in enumerate(manifests):
        convert(manifest, tmp_path / f"{seed}-after", cache.folder)
        convert(manifest, tmp_path / f"{seed}-last", cache.folder, make=never)
    assert verify(cache) == []


PRUNE = """import sys, time
from pathlib import Path
while True:
    for path in Path(sys.argv[1]).rglob("*"):
        if path.is_file() and path.suffix != ".tmp": path.unlink(missing_ok=True)
    time.sleep(0.02)
"""


@pytest.mark.parametrize("num_copied", [0, 1])
def test_killed_while_it_puts(tmp_path: Path, cache: Cache, num_copied: int) -> None:
    """In the middle of the first file, and of the second."""
    manifest = checkpoint(tmp_path)
    undisturbed = contents(convert(manifest, tmp_path / "undisturbed", "").parent)
    kill_while_it_copies(num_copied, manifest, cache.folder, tmp_path / "killed")
    assert not entries(cache) and len(list(cache.folder.rglob("*.tmp"))) == 1
    assert verify(cache) == [], "a half file has no name that is used"
    assert contents(tmp_path / "killed") == undisturbed, "files and record are written before the cache"
    code, stderr = run(manifest, tmp_path / "next", cache.folder)
    assert code == 0 and contents(tmp_path / "next") == undisturbed
    convert(manifest, tmp_path / "last", cache.folder, make=never)
    assert len(entries(cache)) == 1


def test_killed_while_it_takes(tmp_path: Path, cache: Cache) -> None:
    manifest = checkpoint(tmp_path)
    undisturbed = contents(convert(manifest, tmp_path / "undisturbed", cache.folder).parent)
    out = tmp_path / "killed"
    convert(checkpoint(tmp_path / "earlier", seed=1), out, "")
    kill_while_it_copies(1, manifest, cache.folder, out)  # after the manifest
    assert any(out.glob(".weights.safetensors.*.tmp"))
    assert not (out / "weights.json").exists(), "the earlier manifest would describe the new weights wrongly"
    assert not (out / "weights.statement.json").exists()
    convert(manifest, out, cache.folder, make=never)
    files = {name: data for name, data in contents(out).items() if not name.endswith(".tmp")}
    assert files == undisturbed and not any(out.glob(".weights.safetensors.*.tmp")) and verify(cache) == []


# The process stops itself in the middle of a copy, so that a test need not be quick.
STOP = """import os, shutil, signal
copy, num_copied = shutil.copyfile, 0
def copy_half_and_stop(source, target):
    global num_copied
    if num_copied == {0}:
        data = open(source, "rb").read()
        open(target, "wb").write(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGSTOP)
    num_copied += 1
    return copy(source, target)
shutil.copyfile = copy_half_and_stop
"""


def kill_while_it_copies(num_copied: int, manifest: Path, cache: Path, folder: Path) -> None:
    """Run `convert` and kill it in the middle of a copy, after as many whole ones."""
    process = start(manifest, cache, folder, before=STOP.format(num_copied))
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), process.stderr.read()
    process.kill()
    process.communicate()


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").touch()


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_link_to_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def a_flipped_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edited(change: Callable[[dict], None]) -> Callable[[Path], None]:
    """An entry that was written by the rules, with other content."""

    def damage(path: Path) -> None:
        value = json.loads(path.read_text())
        del value["predicate"][DIGEST]
        change(value)
        value["predicate"][DIGEST] = sha256_json(value)
        path.write_text(dump_json(value))

    return damage


def names_a_file_outside(value: dict) -> None:
    value["subject"].insert(0, {**value["subject"][0], "name": "../outside.json"})


def is_made_of_others(path: Path) -> None:
    statement = Statement.load(path)
    replace(statement, key=replace(statement.key, options={"other": 1})).save(path)


def lacks_a_file(path: Path) -> None:
    statement = Statement.load(path)
    outputs = {name: sha256 for name, sha256 in statement.outputs.items() if name != "weights.safetensors"}
    replace(statement, outputs=outputs).save(path)


ANY = {
    "random bytes": lambda path: path.write_bytes(random.Random(1).randbytes(5000)),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-10]),
    "empty": lambda path: path.write_bytes(b""),
    "a flipped byte": a_flipped_byte,
    "gone": lambda path: path.unlink(),
    "a folder": a_folder,
    "a pipe": a_pipe,
    "a link to nowhere": a_link_to_nowhere,
}
ENTRY = {
    "no mapping": lambda path: path.write_text("[1, 2]"),
    "deep": lambda path: path.write_text("[" * 200_000),
    "not a number": lambda path: path.write_text('{"predicate": NaN}'),
    "of another format": lambda path: path.write_text('{"format": "lockstep.build/1", "outputs": {}}'),
    "another key": is_made_of_others,
    "half a key": edited(lambda value: value["predicate"]["buildDefinition"]["externalParameters"].pop("names")),
    "no files": edited(lambda value: value["subject"].clear()),
    "files of another kind": edited(lambda value: value.update(subject=[1])),
    "a file outside": edited(names_a_file_outside),
    "a file too few": lacks_a_file,
}  # fmt: skip
# Of what stays in the way no new file can take the place.
STAYS = ("a folder",)


GARBAGE = list(itertools.product(("entry", "manifest", "weights"), ANY))
GARBAGE += [("entry", name) for name in ENTRY]
ALWAYS = [("weights", "a flipped byte"), ("manifest", "gone"), ("entry", "a folder")]
ALWAYS += [("entry", name) for name in ("no mapping", "another key", "a file outside", "a file too few")]


@pytest.mark.parametrize(("kind", "name"), some(GARBAGE, *ALWAYS))
def test_garbage_is_never_used(tmp_path: Path, cache: Cache, capsys, kind: str, name: str) -> None:
    manifest = checkpoint(tmp_path)
    undisturbed = contents(convert(manifest, tmp_path / "undisturbed", cache.folder).parent)
    (entry,) = entries(cache)
    blobs = {name: cache.blob_path(sha256) for name, sha256 in entry.outputs.items()}
    path = {
        "entry": cache.entry_path(entry.key.sha256),
        "manifest": blobs["weights.json"],
        "weights": blobs["weights.safetensors"],
    }[kind]
    (ANY | ENTRY)[name](path)
    if not (kind == "entry" and name == "gone"):
        # only a look into the manifest tells that there are too few
        assert any(str(path) in line for line in verify(cache)) or name in ("a file too few", "no files")
    capsys.readouterr()
    convert(manifest, tmp_path / "made", cache.folder)
    lines = capsys.readouterr().err.splitlines()
    assert contents(tmp_path / "made") == undisturbed and not (tmp_path / "outside.json").exists()
    assert len(lines) == (1 if (kind, name) == ("entry", "gone") else 2) and all(
        line.startswith("cache: ") for line in lines
    )
    assert len(lines) == 1 or str(path) in lines[0] and lines[0].endswith("; convert m/fp32 is made again")
    if name in STAYS:
        line = lines[-1].removeprefix(f"cache: convert m/fp32 is not put into {cache.folder}: ")
        assert line.endswith(
            ": expected to write a file here, found a folder; remove or rename it, or choose another place"
        )
        assert any(str(path) in line for line in verify(cache))
    else:
        convert(manifest, tmp_path / "taken", cache.folder, make=never)
        assert contents(tmp_path / "taken") == undisturbed and verify(cache) == []


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder], capture_output=True
    ).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_costs_the_cache_and_nothing_else(tmp_path: Path) -> None:
    manifest = checkpoint(tmp_path, megabytes=2)
    undisturbed = contents(convert(manifest, tmp_path / "undisturbed", "").parent)
    with small_disk(tmp_path / "disk", 1024) as disk:
        code, stderr = run(manifest, tmp_path / "made", disk / "cache")
        assert code == 0 and contents(tmp_path / "made") == undisturbed
        assert stderr == (
            f"cache: {disk / 'cache'} cannot be written (No space left on device): convert m/fp32 is not put into it\n"
        )
        assert not entries(Cache(disk / "cache")) and not list(disk.rglob("*.tmp"))
        assert verify(Cache(disk / "cache")) == []


def test_a_cache_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    manifest = checkpoint(tmp_path / "one")
    other = checkpoint(tmp_path / "other", seed=1)
    undisturbed = contents(convert(manifest, tmp_path / "undisturbed", "").parent)
    with small_disk(tmp_path / "disk", 4096) as disk:
        cache = Cache(disk / "cache")
        convert(manifest, tmp_path / "made", cache.folder)
        before = contents(cache.folder)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        code, stderr = run(manifest, tmp_path / "taken", cache.folder)
        assert code == 0 and contents(tmp_path / "taken") == undisturbed
        assert (
            stderr.startswith(f"cache: convert m/fp32 is taken from {cache.folder}") and len(stderr.splitlines()) == 1
        )
        code, stderr = run(other, tmp_path / "new", cache.folder)
        assert code == 0 and stderr == (
            f"cache: {cache.folder} cannot be written (Read-only file system): convert m/fp32 is not put into it\n"
        )
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        a_flipped_byte(next(cache.blobs.iterdir()))
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        code, stderr = run(manifest, tmp_path / "anew", cache.folder)
        assert code == 0 and contents(tmp_path / "anew") == undisturbed
        assert ("the file is damaged; convert m/fp32 is made again") in stderr and (
            "cannot be written (Read-only file system)"
        ) in stderr
        assert contents(cache.folder).keys() == before.keys()


@pytest.mark.long
def test_the_memory_of_a_large_file_is_no_proof(tmp_path: Path, cache: Cache) -> None:
    """A blob is hashed on each use: damage that leaves the file's times is found."""
    manifest = checkpoint(tmp_path, megabytes=10)
    undisturbed = contents(convert(manifest, tmp_path / "undisturbed", cache.folder).parent)
    path = max(cache.blobs.iterdir(), key=lambda path: path.stat().st_size)
    assert path.stat().st_size > 16 * MB
    before = path.stat()
    a_flipped_byte(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    convert(manifest, tmp_path / "made", cache.folder)
    assert contents(tmp_path / "made") == undisturbed and verify(cache) == []
