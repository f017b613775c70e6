"""Write beside each pin the sha256 of its files, so that pip can install with `--require-hashes`.

In and out: the lists of this folder; `hashes.txt` is made of requirements.txt without torch, whose build is chosen by
who installs it. uv is asked which files there are; those that the list's Pythons and machines can use are kept, and the
source where there is none.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tomllib
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

FOLDER = Path(__file__).parent
LINUX = ((11, 12, 13), ("x86_64", "aarch64"))  # minor versions of Python, and machines
X86 = ((11, 12, 13), ("x86_64",))
ONE = ((11,), ("x86_64",))
# Not here: genai.txt, whose build of torch is chosen by who installs it.
LISTS = {
    "requirements": LINUX, "openvino": LINUX, "tokenizers": LINUX, "test": LINUX, "publish": LINUX, "otel": LINUX,
    "docs": LINUX, "oldest": LINUX, "slurm": LINUX, "kubernetes": LINUX, "kubernetes-test": LINUX, "smollm2": LINUX,
    "cuda": X86, "tensorrt": X86, "tritonclient": LINUX, "triton": ONE, "lm-eval": ONE,
    "agents": ONE, "aiperf": ONE, "perf-analyzer": ONE, "bfcl": ONE, "llama-cpp": ONE,
    "snakedeploy": LINUX,
}  # fmt: skip
HEADER = """\
# Files of the pins of requirements.txt, by sha256; made by `make hashes`, without torch, whose build TORCH chooses.
"""


def canonical(pin: str) -> str:
    return re.sub(r"[-_.]+", "-", pin.partition("==")[0]).lower()


def tags(minors: Iterable[int], machines: Iterable[str]) -> set[Tag]:
    """Return the tags of wheels for glibc that some of the Pythons take on some of the machines."""
    names = [*(f"manylinux_2_{minor}" for minor in range(5, 40)), "manylinux2014", "manylinux2010", "manylinux1"]
    found: set[Tag] = set()
    for minor in minors:
        platforms = [f"{name}_{machine}" for machine in machines for name in [*names, "linux"]]
        found |= set(cpython_tags((3, minor), platforms=platforms))
        found |= set(compatible_tags((3, minor), f"cp3{minor}", platforms))
    return found


def digests(package: dict[str, Any], usable: set[Tag]) -> list[str]:
    files = [
        wheel
        for wheel in package.get("wheels", [])
        if parse_wheel_filename(wheel["url"].rpartition("/")[2])[3] & usable
    ]
    return sorted(file["hashes"]["sha256"] for file in files or [package["sdist"]])


def with_digests(lines: list[str], minors: tuple[int, ...], machines: tuple[str, ...]) -> list[str]:
    """Return the lines with the digests of each pin's files."""
    lines = [re.sub(r"\s+--hash=\S+", "", line) for line in lines]
    command = ["uv", "pip", "compile", "--quiet", "--no-config", "--no-deps", "--universal", "--format", "pylock.toml"]
    command += ["--python-version", f"3.{minors[0]}.9", "-"]
    done = subprocess.run(command, input="\n".join(lines), stdout=subprocess.PIPE, text=True, check=True)
    usable = tags(minors, machines)
    found = {canonical(package["name"]): digests(package, usable) for package in tomllib.loads(done.stdout)["packages"]}
    return [
        " ".join([line, *(f"--hash=sha256:{sha256}" for sha256 in found[canonical(line)])])
        if "==" in line and not line.startswith("#")
        else line
        for line in lines
    ]


def write(name: str) -> None:
    path, header = FOLDER / f"{name}.txt", ""
    lines = path.read_text().splitlines()
    if name == "requirements":
        path, header = FOLDER / "hashes.txt", HEADER
        lines = [line for line in lines if not line.startswith(("torch==", "#"))]
    path.write_text(header + "\n".join(with_digests(lines, *LISTS[name])) + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:] or LISTS:
        write(name)
