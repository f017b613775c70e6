"""Build keys: what a stage's digests see, and what they leave out."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import onnx
import pytest
import yaml

from lockstep.errors import InputError
from lockstep.provenance import code_identity

REPOSITORY = Path(__file__).resolve().parents[2]
STAGES = (
    "checkpoint.hub",
    "export.make_checkpoint",
    "checkpoint",
    "weights",
    "export",
    "verify.validate",
    "backends",
    "verify.compare",
    "verify.golden.reference",
    "verify.golden.check",
    "report.summary",
    "report.plots",
)
# Which environment file the rules of a stage name, and so must hold what the stage imports.
ENVIRONMENTS = {
    "checkpoint.hub": "fetch",
    "export.make_checkpoint": "torch",
    "checkpoint": "checkpoint",
    "weights": "checkpoint",
    "export": "torch",
    "verify.validate": "torch",
    "verify.golden.reference": "torch",
    "backends": "engine",
    "verify.compare": "engine",
    "verify.golden.check": "engine",
    "serve.check": "serve",
    "report.summary": "report",
    "report.plots": "report",
}


def names(entry: str) -> set[str]:
    return {path.relative_to(REPOSITORY / "src" / "lockstep").as_posix() for path in code_identity.module_files(entry)}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty package in place of this one."""
    monkeypatch.setattr(code_identity, "SOURCES", tmp_path)
    write(tmp_path, "__init__.py", "")
    forget()
    yield tmp_path
    monkeypatch.undo()
    forget()


def forget() -> None:
    code_identity._read.cache_clear()
    code_identity._reach.cache_clear()
    code_identity._file_of.cache_clear()


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    forget()


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("import lockstep.other", "start.py"),
        ("from lockstep.other import name", "start.py"),
        ("from lockstep import other", "start.py"),
        ("def late():\n    from lockstep.other import name", "start.py"),
        ("from . import other", "start.py"),
        ("from .other import name", "start/__init__.py"),
        ("from .deep import x", "start/__init__.py"),
        ("MODULE = 'lockstep.other'", "start.py"),
    ],
)  # fmt: skip
def test_an_import_in_any_form_is_followed(package: Path, line: str, where: str) -> None:
    write(package, where, line)
    write(package, "other.py", "name = 1")
    write(package, "start/other.py" if where.startswith("start/") else "unused.py", "name = 1")
    write(package, "start/deep.py" if where.startswith("start/") else "unused.py", "from ..other import name")
    before = code_identity.code_digest("start")
    for name in ("other.py", "start/other.py"):
        if (package / name).exists():
            write(package, name, "name = 2")
    assert code_identity.code_digest("start") != before


def test_a_name_with_a_star_is_the_module_of_each_folder_but_of_the_job_s_backend_only(package: Path) -> None:
    write(package, "start.py", "MODULE = 'lockstep.backends.*.backend'")
    for name in ("first", "second"):
        write(package, f"backends/{name}/backend.py", "")
        write(package, f"backends/{name}/settings.py", "")
    found = lambda backend: {name for name in code_identity.code_files("start", backend) if name.count("/") == 2}
    assert found(None) == {"backends/first/backend.py", "backends/second/backend.py"}
    assert found("second") == {"backends/second/backend.py"}


def test_cuda_source_that_a_module_names_counts(package: Path) -> None:
    write(package, "start.py", "SOURCE = 'kernel.cu'")
    write(package, "kernel.cu", "// one")
    write(package, "other.cu", "// one")
    before = code_identity.code_digest("start")
    write(package, "other.cu", "// two")
    assert code_identity.code_digest("start") == before
    write(package, "kernel.cu", "// two")
    assert code_identity.code_digest("start") != before


@pytest.mark.parametrize(
    "changed",
    [
        b'TEXT = """one\n\ntwo"""\n',
        b'TEXT = """one  \ntwo"""\n',
        b'TEXT = """one\n two"""\n',
        b'TEXT = """one\n# two"""\n',
    ],
)
def test_every_byte_of_a_string_counts(package: Path, changed: bytes) -> None:
    (package / "start.py").write_bytes(b'TEXT = """one\ntwo"""\n')
    before = code_identity.digest_of(package / "start.py")
    (package / "start.py").write_bytes(changed)
    assert code_identity.digest_of(package / "start.py") != before


def test_what_changes_nothing_does_not_count(package: Path) -> None:
    (package / "start.py").write_bytes(b'def one():\n    return """a\n\n b"""\n')
    before = code_identity.digest_of(package / "start.py")
    (package / "start.py").write_bytes(
        b'# text\r\n\r\ndef one():  \r\n    """Say.\r\n\r\n    More.\r\n    """\r\n\r\n'
        b'    # why\r\n    return """a\r\n\r\n b"""  # so\r\n'
    )
    assert code_identity.digest_of(package / "start.py") == before


def test_what_is_not_imported_does_not_count(package: Path) -> None:
    write(package, "start.py", "import json, numpy")
    before = code_identity.code_digest("start")
    write(package, "other.py", "x = 1")
    assert code_identity.code_digest("start") == before


def test_the_packages_above_a_module_count(package: Path) -> None:
    write(package, "inner/__init__.py", "")
    write(package, "inner/start.py", "")
    before = code_identity.code_digest("inner.start")
    write(package, "inner/__init__.py", "x = 1")
    assert code_identity.code_digest("inner.start") != before


def test_imports_in_a_circle_end(package: Path) -> None:
    write(package, "start.py", "import lockstep.other")
    write(package, "other.py", "import lockstep.start")
    assert {path.name for path in code_identity.module_files("start")} == {"__init__.py", "start.py", "other.py"}


def test_a_stage_that_does_not_exist_is_named() -> None:
    with pytest.raises(InputError, match="lockstep.nothing"):
        code_identity.code_digest("nothing")


def loaded_by(stage: str) -> set[Path]:
    """The files of this package that importing a stage loads: in a copy of this process, which has the third-party
    packages, and nothing of this one."""
    for package in ("torch", "transformers", "onnx", "onnxruntime", "onnxscript"):
        importlib.import_module(package)
    end, start = os.pipe()
    if not (child := os.fork()):
        try:
            for name in [name for name in sys.modules if name.partition(".")[0] == "lockstep"]:
                del sys.modules[name]
            onnx.defs.register_schema = lambda schema: None  # it is registered already
            importlib.import_module(f"lockstep.{stage}")
            files = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "lockstep"]
            os.write(start, json.dumps(files).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(start)
    with open(end) as pipe:
        written = pipe.read()
    os.waitpid(child, 0)
    return {Path(file) for file in json.loads(written)}


@pytest.mark.parametrize("stage", STAGES)
def test_what_a_stage_loads_is_in_its_digest(stage: str) -> None:
    """The real import against the graph that was read: nothing of this package is loaded that the digest leaves out."""
    loaded = loaded_by(stage)
    assert loaded >= {Path(importlib.util.find_spec(f"lockstep.{stage}").origin)}
    assert loaded <= set(code_identity.module_files(stage))


def test_the_check_does_not_depend_on_how_the_reference_is_made() -> None:
    assert "verify/golden/reference.py" not in names("verify.golden.check") and "export/tracer.py" not in names(
        "verify.golden.check"
    )
    assert "torch" not in code_identity.third_party("verify.golden.check")


def test_digests_are_the_same_in_another_process() -> None:
    code = "from lockstep.provenance.code_identity import stage_key; print(*stage_key('export').values())"
    output = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONPATH": str(REPOSITORY / "src"), "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert output == {" ".join(code_identity.stage_key("export").values()) + "\n"}


def test_a_pin_changes_the_digest_of_those_who_ask_for_it(tmp_path: Path) -> None:
    pins = tmp_path / "requirements.txt"
    pins.write_text("# comment\nNumPy==1.0\nml_dtypes==2.0  # why\n\n")
    numpy, both = (code_identity.environment_digest(names, pins) for names in (["numpy"], ["numpy", "ml-dtypes"]))
    pins.write_text("numpy==1.0\nml-dtypes==3.0\n")
    assert code_identity.environment_digest(["numpy"], pins) == numpy
    assert code_identity.environment_digest(["ml_dtypes", "numpy"], pins) != both


def test_a_package_without_a_pin_is_named(tmp_path: Path) -> None:
    pins = tmp_path / "requirements.txt"
    pins.write_text("numpy==1.0\n")
    with pytest.raises(InputError, match="pin of torch"):
        code_identity.environment_digest(["torch"], pins)
    pins.write_text("numpy>=1.0\n")
    with pytest.raises(InputError, match=r"requirements.txt:1: expected name==version, found 'numpy>=1.0'"):
        code_identity.environment_digest(["numpy"], pins)


@pytest.mark.parametrize("stage", STAGES)
def test_every_package_of_a_stage_is_pinned(stage: str) -> None:
    assert code_identity.third_party(stage) <= set(code_identity.read_pins())
    code_identity.stage_key(stage)


def test_this_environment_is_the_pinned_one() -> None:
    """Versions of what is installed, against the pins: else the digests would speak of other packages than those that
    run."""
    from importlib.metadata import distributions

    installed = {
        code_identity._canonical(item.metadata["Name"]): item.version.partition("+")[0]
        for item in distributions()
        if item.metadata["Name"]
    }
    pins = code_identity.read_pins()
    assert {name: installed.get(name) for name in pins} == pins


@pytest.mark.parametrize("name", sorted(set(ENVIRONMENTS.values())))
def test_the_environment_files_agree_with_the_pins(name: str) -> None:
    environment = yaml.safe_load((REPOSITORY / "envs" / f"{name}.yaml").read_text())
    (packages,) = (item["pip"] for item in environment["dependencies"] if isinstance(item, dict))
    listed = {code_identity._canonical(name): version for name, version in (line.split("==") for line in packages)}
    pins = code_identity.read_pins() | code_identity.read_pins(REPOSITORY / "envs" / "openvino.txt")
    assert listed == {package: pins[package] for package in listed}
    wanted = set().union(*(code_identity.third_party(stage) for stage, group in ENVIRONMENTS.items() if group == name))
    assert wanted <= set(listed), "a stage imports what its environment lacks"


def test_the_packages_are_real() -> None:
    """Import names that are no package's name must stand in the table."""
    for stage in STAGES:
        for package in code_identity.third_party(stage):
            module = {name: module for module, name in code_identity._DISTRIBUTIONS.items()}.get(
                package, package.replace("-", "_")
            )
            assert importlib.util.find_spec(module), package
