"""Bundles: the same bytes each time, the same text from them, and refused in any other form than the one they are
packed in."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tracemalloc
from pathlib import Path

import pytest
from demo_model import DEMO, LIMITS
from recorded import recorded

import lockstep
from lockstep.artifacts.files import DIGEST_KEY, dump_json, read_json, sha256_json, write_json
from lockstep.artifacts.places import StoredFile, TensorPlace
from lockstep.artifacts.statement import statement_path
from lockstep.artifacts.weights import WeightsManifest
from lockstep.bundle.archive import (
    MANIFEST,
    About,
    BundledLimits,
    BundledTarget,
    BundleManifest,
    Entry,
    header,
    read_archive,
    write_archive,
)
from lockstep.bundle.opened import opened, point_into
from lockstep.bundle.pack import pack
from lockstep.errors import CheckError, InputError
from lockstep.runtime import Model, ModelOptions, Tokenizer, generate
from lockstep.targets import Results, Target

TARGET = Target("demo-llama", "fp16", "all", "onnxruntime")
SOURCES = str(Path(__file__).parents[3] / "src")
WITHOUT_EXTRAS = str(Path(__file__).parents[2] / "without_extras.py")
ABOUT = About(BundledTarget("m", "w8a16", "all", "onnxruntime"), BundledLimits(1, 1, 1, 1), "inside")
# as in config/config.yaml
PROMPT = "San Francisco is a"
TEXT = " hilly city on the coast of California, where cool"


@pytest.fixture(scope="module")
def results(demo: Results, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return recorded(demo, tmp_path_factory.mktemp("results") / "results")


@pytest.fixture(scope="module")
def apart(results: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle without weights. Read only."""
    return pack(results, TARGET, LIMITS, tmp_path_factory.mktemp("apart") / "apart.tar")


@pytest.fixture(scope="module")
def inside(results: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with weights. Read only."""
    return pack(results, TARGET, LIMITS, tmp_path_factory.mktemp("inside") / "inside.tar", with_weights=True)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def says(path: Path, weights: Path | None = None) -> str:
    with opened(path, weights) as place:
        model = Model.open(
            place.engines, place.assembly, place.weights, place.target.layers,
            ModelOptions(max_batch_size=1, max_seq_len=place.limits.max_seq_len),
        )  # fmt: skip
        tokenizer = Tokenizer.open(place.assembly)
    return "".join(piece.text for piece in generate(model, tokenizer, [PROMPT], 16))


def refused(path: Path, scratch: Path, weights: Path | None = DEMO) -> str:
    """The line with which a bundle is refused. Nothing may be left of it."""
    with pytest.raises(InputError) as caught, opened(path, weights):
        pass
    assert not list(scratch.iterdir()) and str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    return str(caught.value)


def test_what_it_says_is_what_the_target_says(inside: Path, apart: Path, results: Results, scratch: Path) -> None:
    assert says(inside) == TEXT
    assert says(apart, DEMO) == TEXT
    assert says(apart, results.weights("demo-llama", "fp16")) == TEXT
    assert not list(scratch.iterdir()), "gone while the model still runs"


def test_it_is_the_same_bytes_each_time(results: Results, inside: Path, demo: Results, tmp_path: Path) -> None:
    os.utime(results.engines("demo-llama", "fp16", "onnxruntime"))
    results.weights("demo-llama", "fp16").chmod(0o600)
    assert pack(results, TARGET, LIMITS, tmp_path / "again.tar", with_weights=True).read_bytes() == inside.read_bytes()
    first, second = (
        pack(recorded(demo, tmp_path / name / "results"), TARGET, LIMITS, tmp_path / f"{name}.tar")
        for name in ("first", "deeper/second")
    )
    assert first.read_bytes() == second.read_bytes()


def test_any_tar_reads_it_and_it_holds_no_place(inside: Path, results: Results, tmp_path: Path) -> None:
    with tarfile.open(inside) as tar:
        members = tar.getmembers()
        tar.extractall(tmp_path, filter="data")
    names = [member.name for member in members]
    assert names == [MANIFEST, *sorted(names[1:])] and {
        "engines/engines.statement.json",
        "graphs/tokenizer.json",
        "weights/model.safetensors",
    } < set(names)
    assert {(m.type, m.mode, m.uid, m.gid, m.uname, m.gname, m.mtime) for m in members} == {
        (tarfile.REGTYPE, 0o644, 0, 0, "", "", 0)
    }
    assert (tmp_path / "weights" / "model.safetensors").read_bytes() == (DEMO / "model.safetensors").read_bytes()
    data = inside.read_bytes()
    assert str(results.root).encode() not in data and str(DEMO).encode() not in data
    info = tarfile.TarInfo.frombuf(header("weights/large", 70 << 30), "utf-8", "strict")
    assert (info.name, info.size) == ("weights/large", 70 << 30), "beyond the 8 GiB of ustar"


def test_large_files_are_streamed(tmp_path: Path, scratch: Path) -> None:
    large = tmp_path / "large"
    with open(large, "wb") as file:
        file.truncate(64 << 20)
    digest = "3b6a07d0d404fab4e23b6d34bc6696a6a312dd92821332385e5af7c01c421351"  # of 64 MiB of zeros
    tracemalloc.start()
    path = write_archive(tmp_path / "large.tar", ABOUT, [Entry.of_file("weights/large", large, digest)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20 and read_archive(path).members["weights/large"].size == 64 << 20


def test_a_flipped_byte_anywhere_is_refused(apart: Path, tmp_path: Path, scratch: Path) -> None:
    data = apart.read_bytes()
    path = tmp_path / "damaged.tar"
    members = read_archive(apart).members.values()
    edges = []
    for member in members:
        end = member.offset + member.size
        edges += [member.offset - 512, member.offset - 1, member.offset, end - 1, end]
    for place in sorted({*edges, *range(0, len(data), 997), len(data) - 1}):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        refused(path, scratch)


def test_what_is_cut_short_longer_or_no_bundle_is_refused(apart: Path, tmp_path: Path, scratch: Path) -> None:
    data = apart.read_bytes()
    path = tmp_path / "other.tar"
    for size in (0, 1, 511, 512, 700, 5000, len(data) // 2, len(data) - 1024, len(data) - 512, len(data) - 1):
        path.write_bytes(data[:size])
        refused(path, scratch)
    for suffix in (b"\0", b"x", bytes(512), header("more", 0)):
        path.write_bytes(data + suffix)
        assert "more than the manifest lists" in refused(path, scratch)
    path.write_bytes(data[:-1024] + header("engines/more.onnx", 0) + data[-1024:])
    assert "more than the manifest lists" in refused(path, scratch)
    assert "expected a bundle, found a folder" in refused(tmp_path, scratch)
    for none in (tmp_path / "none.tar", path / "below.tar", tmp_path / f"{'x' * 300}.tar"):
        assert "expected a bundle, found no file" in refused(none, scratch)


def with_entry(apart: Path, path: Path, change) -> Path:
    """The bundle packed again by another program, with `change(TarInfo)` made to one of its files."""
    with tarfile.open(apart) as old, tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as new:
        for member in old.getmembers():
            data = old.extractfile(member).read()
            if member.name == "engines/entry.onnx":
                change(member)
                data = data if member.type == tarfile.REGTYPE else b""
                member.size = len(data)
            new.addfile(member, io.BytesIO(data))
    return path


def kind(value: bytes, target: str = ""):
    def change(member: tarfile.TarInfo) -> None:
        member.type = value
        member.linkname = target

    return change


def named(name: str):
    return lambda member: setattr(member, "name", name)


CHANGES = {
    "symbolic link": (kind(tarfile.SYMTYPE, "/etc/passwd"), "an entry of type '2', 'engines/entry.onnx'"),
    "hard link": (kind(tarfile.LNKTYPE, "engines/exit.onnx"), "an entry of type '1', 'engines/entry.onnx'"),
    "device": (kind(tarfile.CHRTYPE), "an entry of type '3', 'engines/entry.onnx'"),
    "folder": (kind(tarfile.DIRTYPE), "an entry of type '5', 'engines/entry.onnx'"),
    "absolute path": (named("/etc/cron.d/x"), "the file '/etc/cron.d/x'"),
    "path that leads out": (named("engines/../../x"), "the file 'engines/../../x'"),
    "not listed": (named("engines/evil.onnx"), "the file 'engines/evil.onnx' of"),
    "twice": (named("engines/engines.json"), "the file 'engines/engines.json' of"),
    "executable": (lambda member: setattr(member, "mode", 0o4755), "the file 'engines/entry.onnx' of"),
}


@pytest.mark.parametrize("change, difference", CHANGES.values(), ids=CHANGES)
def test_an_entry_that_the_manifest_does_not_list_so_is_refused(
    apart: Path, tmp_path: Path, scratch: Path, change, difference: str
) -> None:
    line = refused(with_entry(apart, tmp_path / "other.tar", change), scratch)
    assert difference in line and "expected the file engines/entry.onnx" in line


def forged(path: Path, names: list[str], **about) -> Path:
    """A bundle whose manifest lists these names, and whose headers are right."""
    # of b"x"
    listed = [
        {"path": name, "size": 1, "sha256": "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"}
        for name in names
    ]
    manifest = {**BundleManifest(ABOUT, ()).to_json(), "files": listed, **about}
    data = dump_json({**manifest, DIGEST_KEY: sha256_json(manifest)}).encode()
    parts = [header(MANIFEST, len(data)), data + bytes(-len(data) % 512)]
    path.write_bytes(b"".join([*parts, *(header(name, 1) + b"x".ljust(512, b"\0") for name in names), bytes(1024)]))
    return path


def test_a_bundle_without_the_documents_of_a_target_is_refused(tmp_path: Path, scratch: Path) -> None:
    line = refused(forged(tmp_path / "forged.tar", ["engines/x"]), scratch, None)
    assert line.endswith("expected engines/engines.json in it, found none; make the bundle again")


@pytest.mark.parametrize("size", [1 << 40, 1 << 61, (1 << 62) - 1])
def test_a_size_beyond_the_file_is_refused(tmp_path: Path, scratch: Path, size: int) -> None:
    listed = [{"path": name, "size": size, "sha256": "0" * 64} for name in ("a", "b", "c", "d", "e")]
    manifest = {**BundleManifest(ABOUT, ()).to_json(), "files": listed}
    data = dump_json({**manifest, DIGEST_KEY: sha256_json(manifest)}).encode()
    path = tmp_path / "forged.tar"
    path.write_bytes(header(MANIFEST, len(data)) + data + bytes(-len(data) % 512) + header("a", size) + bytes(1024))
    assert "expected the file b of" in refused(path, scratch)


def test_an_engine_that_is_none_is_one_line(apart: Path, results: Results, tmp_path: Path) -> None:
    """Of whoever made the bundle, and so with the right digests."""
    shutil.copytree(results.root, tmp_path / "results")
    engines = Results(tmp_path / "results").engines("demo-llama", "fp16", "onnxruntime")
    (engines.parent / "exit.onnx").write_bytes(b"no protobuf")
    value = read_json(engines)
    value["engines"]["exit"]["sha256"] = hashlib.sha256(b"no protobuf").hexdigest()
    write_json(engines, value)
    with pytest.raises(InputError, match="exit.onnx: expected an engine of ONNX Runtime, found a file that is none"):
        lockstep.open_model("demo-llama/fp16/all/onnxruntime", tmp_path / "results")


def test_an_error_names_the_bundle(inside: Path) -> None:
    with pytest.raises(CheckError) as caught, opened(inside) as opened_bundle:
        raise CheckError(f"{opened_bundle.engines}: expected another")
    assert str(caught.value) == f"{inside}: engines/engines.json: expected another"


def test_quantised_weights_keep_their_groups(tmp_path: Path) -> None:
    """Without them no quantised bundle runs."""
    tensors = {"w": TensorPlace("w.safetensors", 0, 4, "I8", (4,))}
    file = StoredFile("w.safetensors", 4, hashlib.sha256(b"1234").hexdigest())
    WeightsManifest.of("w8a16", (file,), tensors, 32).save(tmp_path / "weights.json")
    entry = Entry.of_bytes("weights/w.safetensors", b"1234")
    archive = read_archive(write_archive(tmp_path / "b.tar", ABOUT, [entry]))
    point_into(archive, tmp_path / "weights.json", "0" * 64)
    weights = WeightsManifest.load(tmp_path / "weights.json")
    assert weights.group_size == 32 and weights.tensors["w"].offset == archive.members[entry.name].offset


NAMES = ["/etc/passwd", "C:/x", "../x", "engines/../../x", "..", "engines//x", "./x", "", "a\\..\\b", "a\nb"]


@pytest.mark.parametrize("name", NAMES, ids=map(repr, NAMES))
def test_a_manifest_that_lists_a_path_elsewhere_is_refused(tmp_path: Path, scratch: Path, name: str) -> None:
    assert "files[0].path: expected a plain path" in refused(forged(tmp_path / "forged.tar", [name]), scratch)


@pytest.mark.parametrize("names", [["a", "a"], ["bundle.json"], ["b", "a"]], ids=str)
def test_a_manifest_that_lists_a_name_twice_or_unsorted_is_refused(
    tmp_path: Path, scratch: Path, names: list[str]
) -> None:
    assert "expected sorted names, each once" in refused(forged(tmp_path / "forged.tar", names), scratch)


@pytest.mark.parametrize("names", [["A", "a"], ["a", "a/b"], ["A", "a-c", "a/b"]], ids=str)
def test_names_of_which_one_takes_the_place_of_another_are_refused(
    tmp_path: Path, scratch: Path, names: list[str]
) -> None:
    assert f"takes the place of {names[0]!r}" in refused(forged(tmp_path / "forged.tar", names), scratch)
    with pytest.raises(InputError, match="takes the place of"):
        write_archive(tmp_path / "packed.tar", ABOUT, [Entry.of_bytes(name, b"x") for name in names])


@pytest.mark.parametrize(
    "about", [{"target": {}}, {"files": [{"path": "a", "size": -1, "sha256": ""}]}, {"files": 1}, {"format": "x"}]
)
def test_a_manifest_of_something_else_is_refused(tmp_path: Path, scratch: Path, about: dict) -> None:
    assert MANIFEST in refused(forged(tmp_path / "forged.tar", ["engines/engines.json"], **about), scratch)


def test_weights_that_are_not_those_are_named(apart: Path, inside: Path, tmp_path: Path, scratch: Path) -> None:
    assert "expected --weights, for the bundle holds none" in refused(apart, scratch, None)
    assert "expected no --weights, for the bundle holds its own" in refused(inside, scratch, DEMO)
    with (
        pytest.raises(InputError, match="expected model.safetensors of 3631656 bytes, found no such folder"),
        opened(apart, tmp_path / "none"),
    ):
        pass
    copy = shutil.copytree(DEMO, tmp_path / "changed") / "model.safetensors"
    data = bytearray(copy.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    with pytest.raises(InputError, match=r"model\.safetensors: expected sha256 \w{64}, found \w{64}"):
        says(apart, copy.parent)


def test_what_is_not_as_it_was_recorded_is_not_packed(demo: Results, tmp_path: Path) -> None:
    def line(change) -> str:
        results = recorded(demo, tmp_path / change.__name__ / "results")
        change(results.engines("demo-llama", "fp16", "onnxruntime"))
        with pytest.raises(InputError) as caught:
            pack(results, TARGET, LIMITS, tmp_path / "out.tar")
        assert not list(tmp_path.glob("*.tar")) and not list(tmp_path.glob(".*.tmp"))
        return str(caught.value)

    def damage(path: Path) -> None:
        path.with_name("middle.onnx").write_bytes(b"x")

    def lose(path: Path) -> None:
        path.with_name("middle.onnx").unlink()

    def replace(path: Path) -> None:
        write_json(path, {**read_json(path), "backend_version": "0"})

    def forget(path: Path) -> None:
        statement_path(path).unlink()

    assert "engines/middle.onnx: expected" in line(damage) and "middle.onnx: expected a file" in line(lose)
    for damage_of_a_statement in (replace, forget):
        assert "expected a manifest and the statement of how it was made" in line(damage_of_a_statement)


INTERRUPTED = """
import signal, sys, time
from lockstep.bundle.opened import opened

def use():
    with opened(sys.argv[1]):
        pass

start = time.monotonic()
use()
seconds, interrupted = time.monotonic() - start, 0
signal.signal(signal.SIGALRM, signal.default_int_handler)  # KeyboardInterrupt, as Ctrl-C
for number in range(60):
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds * (number + 1) / 60)
        use()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted += 1
print(interrupted)
"""


def test_an_interrupt_leaves_nothing(inside: Path, tmp_path: Path) -> None:
    """A real process, interrupted at many moments of opening, and where that is, of cleaning up."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": SOURCES}
    process = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(inside)], env=environment, capture_output=True, text=True
    )
    assert int(process.stdout) > 15, process.stderr
    assert not list(tmp_path.iterdir())


def test_it_runs_where_only_the_backend_is_installed(inside: Path, tmp_path: Path) -> None:
    """A real process, in an empty folder, without the packages of the extras."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": SOURCES}
    arguments = ("generate", str(inside), "--prompt", PROMPT, "--max-new-tokens", "16")
    process = subprocess.run(
        [sys.executable, WITHOUT_EXTRAS, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (process.returncode, process.stdout) == (0, TEXT + "\n"), process.stderr
    assert not list(tmp_path.glob("lockstep*"))
