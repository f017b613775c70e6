"""The distribution's name and version, wherever they stand: on the package index `lockstep` is another project."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import tomllib
import yaml

from lockstep import __version__
from lockstep.errors import InputError
from lockstep.workflow.plan import make_plan

REPOSITORY = Path(__file__).parents[3]
FOLDERS = (".ci", ".github", "benchmarks", "config", "docs", "envs", "examples", "profiles", "records", "resources")


def is_source(path: Path) -> bool:
    """Return whether a file is part of the repository, small enough to be a text, and not this one."""
    if not path.is_file() or path == Path(__file__) or "__pycache__" in path.parts:
        return False
    return path.stat().st_size < 1 << 20


FILES = [path for path in REPOSITORY.iterdir() if path.is_file() and path.suffix != ".lock"]
for folder in (*FOLDERS, "src", "tests", "workflow"):
    FILES += filter(is_source, (REPOSITORY / folder).rglob("*"))
# An extra of `lockstep`, and an install of it or of its wheel by that name; of our own name too, while nobody has it.
OTHER_PROJECT = re.compile(
    r"(?<![\w./-])lockstep\[[a-z]"
    r"|(?:pip|uv|pipx) (?:install|download)[^\n]*[\s'\"]lockstep(?:-engines)?(?:[\s'\"=\[]|$)"
    r"|lockstep-\d+\.\d"
)


@pytest.mark.parametrize(
    "line",
    [
        "pip install 'lockstep[grammar]'", "pip install lockstep", "uv pip install lockstep==0.1",
        "./lockstep-0.1.0.whl", 'pip install "lockstep-engines[serve]"',
    ],
)  # fmt: skip
def test_the_pattern_sees_another_project(line: str) -> None:
    assert OTHER_PROJECT.search(line)
    assert not OTHER_PROJECT.search('pip install ".[serve]"') and not OTHER_PROJECT.search("./lockstep_engines-0.1.whl")


def test_nothing_tells_a_user_to_install_another_project() -> None:
    lines_at_fault = []
    for path in FILES:
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        lines_at_fault += [
            f"{path.relative_to(REPOSITORY)}: {line.strip()}" for line in lines if OTHER_PROJECT.search(line)
        ]
    assert lines_at_fault == []


def pins(name: str) -> dict[str, str]:
    """Return the hashes after each pin of a file in envs, by the pin with its package's canonical name."""
    lines = (line.split(maxsplit=1) for line in (REPOSITORY / "envs" / name).read_text().splitlines())
    results = {words[0].partition("=="): "".join(words[1:]) for words in lines if words and words[0][0] not in "#-"}
    return {
        f"{re.sub(r'[-_.]+', '-', name).lower()}=={version}": hashes for (name, _, version), hashes in results.items()
    }


def test_each_pin_that_is_installed_has_the_digests_of_its_files() -> None:
    """`make hashes` writes them; torch's build is chosen by who installs it, for genai.txt too."""
    assert set(pins("hashes.txt")) == {pin for pin in pins("requirements.txt") if not pin.startswith("torch==")}
    files = {path.name for path in (REPOSITORY / "envs").glob("*.txt")} - {"requirements.txt", "genai.txt"}
    assert len(files) > 15
    for name in sorted(files):
        assert not [pin for pin, hashes in pins(name).items() if "--hash=sha256:" not in hashes], name


def test_what_is_installed_together_is_of_one_version() -> None:
    """.venv has the pins of all of these."""
    versions: dict[str, set[str]] = {}
    for file in (
        "requirements.txt",
        "openvino.txt",
        "tokenizers.txt",
        "test.txt",
        "publish.txt",
        "otel.txt",
        "kubernetes.txt",
    ):
        for pin in pins(file):
            name, _, version = pin.partition("==")
            versions.setdefault(name, set()).add(version)
    assert not {name: texts for name, texts in versions.items() if len(texts) > 1}


def test_the_version_is_one() -> None:
    assert f'"version": "{__version__}"' in (REPOSITORY / "workflow/rules/common.smk").read_text()
    with pytest.raises(InputError, match=f"expected version {__version__}.*found 0.1.0; install"):
        make_plan({"version": "0.1.0"})
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert (project["name"], project["version"], citation["version"]) == ("lockstep-engines", __version__, __version__)
    dated = f"\n## {__version__}, {citation['date-released']:%Y-%m-%d}\n"
    assert dated in (REPOSITORY / "CHANGELOG.md").read_text()
    versions = set()
    for path in FILES:
        if path.suffix in (".md", ".yaml") or path.name == "Dockerfile":
            text = path.read_text()
            versions.update(re.findall(r"\blockstep:(\d+\.\d+\.\d+)", text), re.findall(r"newTag: (\S+)", text))
    assert versions == {__version__}


# A Python that makes an environment of itself; its pip installs all but the CPU build of PyTorch, where there is none.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
  *"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *--dry-run*) exit {exit_code} ;;
esac
"""


@pytest.mark.parametrize(
    ("exit_code", "arguments", "size"),
    [
        (0, (), "torch==2.13.0+cpu: 0.5 GB to download"),
        (1, (), "torch==2.13.0: 3 GB to download"),
        (1, ("TORCH=torch==2.13.0+cpu",), "torch==2.13.0+cpu: 0.5 GB to download"),
        (0, ("TORCH=torch==2.13.0",), "torch==2.13.0: 3 GB to download"),
    ],
)
def test_make_says_what_it_downloads(tmp_path: Path, exit_code: int, arguments: tuple[str, ...], size: str) -> None:
    (tmp_path / "envs").symlink_to(REPOSITORY / "envs")
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON.format(exit_code=exit_code))
    python.chmod(0o755)
    machine = tmp_path / "uname"
    machine.write_text("#!/bin/sh\necho x86_64\n")
    machine.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["make", "-f", REPOSITORY / "Makefile", ".venv/.pinned", f"PYTHON={python}", *arguments]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert f"Installing the pins into .venv, with {size}" in process.stdout
