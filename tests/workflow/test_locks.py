"""Lock, verify, explain and diff on a run as a user makes it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from checkout import Checkout

from some import some_cases

MODEL = "demo-llama"
TARGET = f"{MODEL}/fp32/all"
ENGINES = f"{MODEL}/fp32/engines/onnxruntime"


@pytest.fixture(scope="module")
def locked(finished: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """The finished run with its lock. Not to be changed."""
    checkout = finished.copy(tmp_path_factory.mktemp("locked") / "checkout")
    checkout.call("lockstep", "lock")
    return checkout


def explained(checkout: Checkout, target: str = TARGET) -> dict[str, list[str]]:
    """Reasons by stage."""
    reasons: dict[str, list[str]] = {}
    for line in checkout.call("lockstep", "explain", target).stdout.splitlines():
        if line.startswith("  "):
            reasons[next(reversed(reasons))].append(line.strip())
        elif line.endswith(":"):
            reasons[line.split()[0]] = []
    return reasons


def flip(path: Path, position: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 1
    path.write_bytes(data)


def test_a_lock_of_a_finished_run_verifies(locked: Checkout) -> None:
    process = locked.call("lockstep", "verify")
    assert re.fullmatch(r"(\d+) of \1 the same, with 1 lock\n", process.stdout) and int(process.stdout.split()[0]) > 30
    assert locked.call("lockstep", "verify", "--deep").stdout == process.stdout


def test_a_lock_is_sorted_and_holds_no_place_and_no_time(locked: Checkout) -> None:
    text = (locked.folder / "locks" / f"{MODEL}.lock.json").read_text()
    value = json.loads(text)
    assert text == json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    assert str(locked.folder) not in text and not re.search(r"20\d\d-\d\d-\d\d", text)
    assert "graphs/fp32" in value["locked"] and value["made with"]["export"]["packages"]["transformers"]
    assert value["made with"]["build/onnxruntime"]["backend"]["version"]
    locked.call("lockstep", "lock", "--locks", "again")
    assert (locked.folder / "again" / f"{MODEL}.lock.json").read_text() == text


def test_what_is_lost_foreign_or_not_locked_is_told_apart(locked: Checkout, tmp_path: Path) -> None:
    copy = locked.copy(tmp_path / "checkout")
    (copy.results / ENGINES / "middle.onnx").unlink()
    (copy.results / ENGINES / "foreign.onnx").write_bytes(b"x")
    lock = copy.folder / "locks" / f"{MODEL}.lock.json"
    value = json.loads(lock.read_text())
    value["locked"]["graphs/bf16"] = value["locked"].pop("graphs/fp32")
    lock.write_text(json.dumps(value))
    lines = copy.call("lockstep", "verify", check=False).stdout.splitlines()
    assert f"missing   {ENGINES}/middle.onnx: run `lockstep run`" in lines
    assert f"unknown   {ENGINES}/foreign.onnx: no statement names it" in lines
    assert f"unknown   {MODEL}: graphs/fp32: not in the lock" in lines
    assert (
        f"missing   {MODEL}: graphs/bf16: locked, and not there, or in another version's format; run `lockstep run`"
        in lines
    )


def test_nothing_changed_is_nothing_to_explain(locked: Checkout) -> None:
    for layers in (2, "all"):
        assert explained(locked, f"{MODEL}/fp32/{layers}") == {}


def edit_pin(checkout: Checkout) -> None:
    pins = checkout.folder / "envs" / "requirements.txt"
    pins.write_text(re.sub(r"^transformers==.*$", "transformers==9.9.9", pins.read_text(), flags=re.MULTILINE))


EDITS = {
    "a pin": (edit_pin, "export", r"transformers \S+ -> 9\.9\.9"),
    "a module": (
        lambda demo: demo.append("src/lockstep/onnx_tools/fuse_projections.py", "EDITED = 1\n"),
        "build",
        r"code lockstep/onnx_tools \w{12} -> \w{12}",
    ),
    "a weight": (
        lambda demo: flip(demo.folder / "resources" / MODEL / "model.safetensors", -100),
        "resolve",
        r"model\.safetensors changed: sha256 \w{12} -> \w{12}",
    ),
    "a tokenizer": (
        lambda demo: demo.append(f"resources/{MODEL}/tokenizer.json", "\n"),
        "architecture",
        r"tokenizer\.json changed: sha256 \w{12} -> \w{12}",
    ),
    "a tolerance": (
        lambda demo: demo.edit_config(lambda config: config.setdefault("tolerances", {}).update(fp32={"noise": 9})),
        "golden",
        r"option tolerance\.noise 6\.0 -> 9\.0",
    ),
    "a limit": (
        lambda demo: demo.edit_config(lambda config: config["limits"].update(max_seq_len=200)),
        "golden",
        r"option limits\.max_seq_len 256 -> 200",
    ),
}
# Stages that a run of one target repeats although the target does not need them.
OTHERS = {"config", "summary"}


@pytest.mark.parametrize("edit, stage, reason", some_cases(EDITS, "a module"))
def test_explain_names_what_changed_and_what_a_run_makes_again(demo: Checkout, edit, stage: str, reason: str) -> None:
    edit(demo)
    reasons = explained(demo)
    assert any(re.search(reason, line) for line in reasons[stage]), reasons
    assert set(reasons) == set(demo.would_run()) - OTHERS, "explain and Snakemake agree"


OTHER_DEVICE = "aarch64"


def with_another_device(locked: Checkout, folder: Path) -> tuple[Path, dict]:
    """The lock as if a machine of another architecture had locked the engines of one precision before."""
    value = json.loads((locked.folder / "locks" / f"{MODEL}.lock.json").read_text())
    (place,) = (name for name in value["locked"] if name.startswith("engines/fp32/onnxruntime/"))
    value["locked"][f"engines/fp32/onnxruntime/{OTHER_DEVICE}"] = value["locked"].pop(place)
    folder.mkdir()
    path = folder / f"{MODEL}.lock.json"
    path.write_text(json.dumps(value))
    return path, value


def test_a_lock_adds_a_device_and_says_so(locked: Checkout, tmp_path: Path) -> None:
    path, _ = with_another_device(locked, tmp_path / "locks")
    process = locked.call("lockstep", "verify", "--locks", str(path.parent), check=False)
    assert process.returncode == 1 and re.search(r"unknown .*engines/fp32/onnxruntime/\w+: not in", process.stdout)
    process = locked.call("lockstep", "lock", "--locks", str(path.parent))
    engines = [name for name in json.loads(path.read_text())["locked"] if name.startswith("engines/fp32/onnxruntime/")]
    assert len(engines) == 2 and f"engines/fp32/onnxruntime/{OTHER_DEVICE}" in engines
    (line,) = process.stderr.splitlines()
    assert re.search(rf": added engines/fp32/onnxruntime/(?!{OTHER_DEVICE})", line)


def looser(value: dict) -> None:
    """Let the lock before be stricter: a tolerance, a prompt and a check that are not in the config."""
    locked = value["locked"]
    locked["checks/golden/fp32/2/onnxruntime"]["tolerance"]["noise"] /= 2
    locked["checks/reference/2"]["golden"]["prompts"]["004"] = "Dark"
    locked["checks/served/fp32/3/onnxruntime"] = locked["checks/served/fp32/2/onnxruntime"]


LOOSER = (
    r"changed checks/golden/fp32/2/onnxruntime: tolerance\.noise 3.0 -> 6.0, which is looser",
    r"changed checks/reference/2: golden\.prompts\.004 gone, was Dark, which is looser",
    r"dropped checks/served/fp32/3/onnxruntime",
)


def test_each_change_of_a_lock_is_printed_and_what_is_looser_is_written_only_when_accepted(
    locked: Checkout, tmp_path: Path
) -> None:
    """Also engines that another device locked, for graphs that are others now."""
    path, value = with_another_device(locked, tmp_path / "locks")
    value["locked"]["graphs/fp32"]["attention.decode.onnx"] = "0" * 64
    value["locked"]["checks/compare/fp32/onnxruntime"]["seconds"] = 1
    looser(value)
    path.write_text(json.dumps(value))
    before = path.read_bytes()
    process = locked.call("lockstep", "lock", "--locks", str(path.parent), check=False)
    assert process.returncode == 1 and path.read_bytes() == before
    *lines, error = process.stderr.splitlines()
    expected = [
        *LOOSER,
        rf"dropped engines/fp32/onnxruntime/{OTHER_DEVICE}",
        r"added engines/fp32/onnxruntime/\w+",
        r"changed checks/compare/fp32/onnxruntime: seconds 1 -> 30",
        r"changed graphs/fp32: attention\.decode\.onnx 0{12} -> \w{12}",
    ]
    assert len(lines) == len(expected)
    for pattern in expected:
        assert any(re.fullmatch(rf"{re.escape(str(path))}: {pattern}", line) for line in lines), (pattern, lines)
    assert "found 4 that are dropped or looser" in error and "--accept" in error
    process = locked.call("lockstep", "lock", "--accept", "--locks", str(path.parent))
    assert process.stderr.splitlines() == lines
    assert OTHER_DEVICE not in path.read_text()


def test_a_lock_of_what_is_not_finished_is_refused(demo: Checkout) -> None:
    shutil.rmtree(demo.results / MODEL / "fp32" / "golden")
    for model, message in (
        (MODEL, "expected a finished model, found nothing of golden"),
        ("other", "found no engines"),
    ):
        process = demo.call("lockstep", "lock", model, check=False)
        assert process.returncode == 2 and message in process.stderr and len(process.stderr.splitlines()) == 1


@pytest.mark.long
def test_a_model_whose_server_is_not_checked_is_locked_without_that_check(demo: Checkout) -> None:
    demo.edit_config(lambda config: config.update(check_server=False))
    for path in demo.results.rglob("served"):
        shutil.rmtree(path)
    demo.finish()
    demo.call("lockstep", "lock")
    lock = json.loads((demo.folder / "locks" / f"{MODEL}.lock.json").read_text())
    assert not [name for name in lock["locked"] if name.startswith("checks/served")]
    assert not demo.would_run("--config", "locked=true")
