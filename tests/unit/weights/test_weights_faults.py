"""Convert on a full disk, killed, with little memory: real processes, real limits."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoints import error_of, write

from lockstep.checkpoint import resolve
from lockstep.weights import Weights, convert
from some import some

RUN = (
    "import sys; from lockstep.errors import guard; from lockstep.weights import convert\nwith guard(): "
    "convert(sys.argv[1], sys.argv[2], sys.argv[3])"
)
LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))\n"  # of a file, in bytes
MB = 1 << 20
# The process stops itself when it has written that many bytes, so that a test need not be quick.
STOP = """import os, signal
from lockstep.weights import writer
write_all, num_written = writer._write_all, 0
def write_and_stop(file, data):
    global num_written
    write_all(file, data)
    if num_written <= {0} < num_written + len(data):
        os.kill(os.getpid(), signal.SIGSTOP)
    num_written += len(data)
writer._write_all = write_and_stop
"""


def big_checkpoint(folder: Path, megabytes: int, fill: float = 0.5) -> Path:
    """A resolved bf16 checkpoint of one large tensor and a small one; gives its manifest."""
    write(
        folder, {"big": np.full(megabytes * MB // 2, fill, ml_dtypes.bfloat16), "small": np.ones(3, ml_dtypes.bfloat16)}
    )
    return resolve(str(folder), folder, folder.parent / "checkpoint.json")


def start(code: str, *arguments: object, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        **options,
    )  # fmt: skip


def start_and_stop(num_bytes: int, *arguments: object) -> subprocess.Popen:
    """Start convert; return it as a stopped process that has written as many bytes."""
    process = start(STOP.format(num_bytes) + RUN, *arguments)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), process.stderr.read()
    return process


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("share", some([0.5, 0.05, 0.95]))
def test_killed_while_it_writes_and_run_again(tmp_path, share):
    checkpoint = big_checkpoint(tmp_path / "checkpoint", 48)
    out = tmp_path / "fp32" / "weights.json"
    process = start_and_stop(int(share * 96 * MB), checkpoint, "fp32", out)
    half = out.with_name(f".weights.safetensors.{process.pid}.tmp")
    process.kill()
    process.wait()
    process.stderr.close(), process.stdout.close()
    assert [path.name for path in out.parent.iterdir()] == [half.name], "only the temporary file is left"
    convert(checkpoint, "fp32", out)
    assert sorted(contents(out.parent)) == ["weights.json", "weights.safetensors"]
    undisturbed = convert(checkpoint, "fp32", tmp_path / "again" / "weights.json")
    assert contents(out.parent) == contents(undisturbed.parent)


def test_killed_between_the_weights_and_their_manifest(tmp_path):
    """The one moment when new weights are there and the earlier manifest would describe them wrongly."""
    out = tmp_path / "fp32" / "weights.json"
    convert(big_checkpoint(tmp_path / "checkpoint", 1, fill=0.5), "fp32", out)
    checkpoint = big_checkpoint(tmp_path / "checkpoint", 1, fill=0.25)
    dies = (
        "import os, signal, sys, lockstep.weights; sys.modules['lockstep.artifacts.document'].write_bytes = "
        "lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    process = start(dies + RUN, checkpoint, "fp32", out)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert sorted(contents(out.parent)) == [".weights.json.files.tmp", "weights.safetensors"]
    assert "found none; run `lockstep run` first" in error_of(Weights.open, out)
    assert Weights.open(convert(checkpoint, "fp32", out))["big"][0] == 0.25


def test_interrupted_it_removes_its_half_file(tmp_path):
    checkpoint = big_checkpoint(tmp_path / "checkpoint", 48)
    out = tmp_path / "fp32" / "weights.json"
    process = start_and_stop(0, checkpoint, "fp32", out)
    assert [path.name for path in out.parent.iterdir()] == [f".weights.safetensors.{process.pid}.tmp"]
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    assert process.communicate()[1] == (
        "lockstep: error: interrupted; finished results are kept, run the same command to go on\n"
    )
    assert process.returncode == 130
    assert list(out.parent.iterdir()) == []


def test_a_file_size_limit_in_the_middle_is_one_line(tmp_path):
    """What a full disk looks like when it fills while convert writes: the system refuses a write."""
    checkpoint = big_checkpoint(tmp_path / "checkpoint", 8)
    out = tmp_path / "fp32" / "weights.json"
    process = start(LIMIT.format(5 * MB) + RUN, checkpoint, "fp32", out)
    line = process.communicate()[1]
    assert process.returncode == 2
    assert line.startswith(f"lockstep: error: {out.with_name('weights.safetensors')}: expected ")
    assert line.endswith(
        "bytes free for the converted weights, found the disk full (File too large); free space and run again\n"
    )
    assert list(out.parent.iterdir()) == []


def test_a_full_disk_is_one_line_of_a_build_and_leaves_nothing(demo, tmp_path):
    """Also where ONNX Runtime writes, which calls it "Protobuf serialization failed"."""
    build = "import sys, lockstep; lockstep.build_engines(sys.argv[1], 'onnxruntime', sys.argv[2])"
    out = tmp_path / "engines" / "engines.json"
    process = start(LIMIT.format(3000) + build, demo.assembly("demo-llama", "fp32"), out)
    line = process.communicate()[1].splitlines()[-1]
    assert re.fullmatch(
        rf"lockstep.errors.InputError: {out.parent}: expected room for engines, found the disk full \(.+\); free space "
        "and run again",
        line,
    )
    assert list(out.parent.iterdir()) == []


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int):
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_disk_too_small_is_told_before_anything_is_written(tmp_path):
    checkpoint = big_checkpoint(tmp_path / "checkpoint", 4)
    with small_disk(tmp_path / "disk", 5) as disk:
        line = error_of(convert, checkpoint, "fp32", disk / "weights.json")
        assert line.startswith(f"{disk}/weights.safetensors: expected 8388")
        assert line.endswith(
            " bytes free for the converted weights, found 5242880; free space or choose another output folder"
        )
        assert list(disk.iterdir()) == []
        convert(checkpoint, "bf16", disk / "weights.json")  # points into the checkpoint: room enough


def test_a_disk_that_others_fill_meanwhile(tmp_path):
    checkpoint = big_checkpoint(tmp_path / "checkpoint", 24)
    with small_disk(tmp_path / "disk", 50) as disk:
        process = start_and_stop(0, checkpoint, "fp32", disk / "weights.json")
        filler = disk / "filler"
        with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(MB)) == MB:  # until the disk is full
                pass
        process.send_signal(signal.SIGCONT)
        line = process.communicate()[1]
        assert process.returncode == 2
        assert line.endswith("found the disk full (No space left on device); free space and run again\n")
        assert list(disk.iterdir()) == [filler]
        filler.unlink()
        assert len(Weights.open(convert(checkpoint, "fp32", disk / "weights.json"))) == 2


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_memory_does_not_grow_with_a_tensor(tmp_path, precision):
    checkpoint = big_checkpoint(tmp_path / "checkpoint", 160)
    out = tmp_path / "out" / "weights.json"
    process = start(RUN + "\nprint(open('/proc/self/status').read())", checkpoint, precision, out)
    status = process.communicate()[0]
    assert process.returncode == 0
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    # Python with NumPy is about 35 MB, pieces about 15 MB; the tensor alone is 160 MB.
    assert peak < 100 * 1024
