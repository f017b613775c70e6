"""Lists what the backend names of TensorRT's Python API: which versions have it, and how many arguments it takes.

    python tests/data/tensorrt_api.py FOLDER    fetches the wheels into FOLDER, writes tensorrt_api.txt next to this

`Class.method(1,2)` takes one or two arguments, positional; `members Class` lists all that a class has in any version.
With the folder named in LOCKSTEP_TENSORRT_WHEELS a test holds the listing to the modules. A wheel's extension module is
imported for its names alone, next to empty fakes of the libraries that it links: no GPU and no library is needed, but
gcc and binutils.
"""

import ast
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from lockstep_gpu.backends.tensorrt import compat

LISTING = Path(__file__).with_suffix(".txt")
WHEELS = "LOCKSTEP_TENSORRT_WHEELS"
_PACKAGES = {
    "tensorrt-cu12-bindings": ("10.3.0", "10.6.0", "10.7.0", "10.8.0.43"),
    "tensorrt-cu13-bindings": ("10.15.1.29", "10.16.1.11", "11.0.0.114", "11.2.1.2", "11.4.0.106"),
}
_WORDS = set(re.findall(r"\w+", Path(compat.__file__).read_text()))
# Some that no line may use, for the test of the test.
_OTHERS = ("BuilderFlag.FP16",)
_NAMES = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("tensorrt.tensorrt", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
for name, value in vars(module).items():
    if name.startswith("_"):
        continue
    print(repr((name, getattr(value, "__init__", None).__doc__ if isinstance(value, type) else "")))
    if isinstance(value, type):
        for member, of in vars(value).items():
            if not (member.startswith("_") or hasattr(value, "__members__") and member in ("name", "value")):
                print(repr((f"{name}.{member}", of.__doc__ if callable(of) else "")))
"""


def counts(name: str, text: str | None) -> str:
    """Return "(1,2)" for a function that takes one or two arguments, by pybind11's docstring; "" for other objects."""
    function = name.rpartition(".")[2] if "." in name else "__init__"
    arities: set[int] = set()
    for line in (text or "").splitlines():
        signature = re.match(rf"(?:\d+\. )?{function}\((.*)\)(?: -> .*)?$", line)
        if signature is None or signature[1] == "*args, **kwargs":
            continue
        plain = signature[1]
        while (flat := re.sub(r"\[[^][]*\]|<[^<>]*>|\([^()]*\)", "", plain)) != plain:
            plain = flat
        arguments = [part for part in plain.split(", ") if part and not part.startswith("self")]
        required = sum("=" not in part for part in arguments)
        arities |= {*range(required, len(arguments) + 1)}
    return f"({','.join(map(str, sorted(arities)))})" if arities else ""


def names(wheel: Path) -> set[str]:
    """`Class` and `Class.member` of all that the wheel's extension module defines, with what functions take; what a
    class inherits stands with its base."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        module = Path(
            archive.extract(next(name for name in archive.namelist() if name.endswith("/tensorrt.so")), folder)
        )
        undefined = [line.split()[-1] for line in output("nm", "-D", "--undefined-only", str(module)).splitlines()]
        # not the C and C++ libraries'
        symbols = [name for name in undefined if re.search("nv|Nv|Infer|Plugin", name) and "@" not in name]
        code = Path(folder) / "fake.c"
        code.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in symbols))
        for library in sorted(set(re.findall(r"\[(libnv\S+?)\]", output("readelf", "-d", str(module))))):
            output("gcc", "-shared", "-fPIC", "-o", str(Path(folder) / library), str(code), f"-Wl,-soname,{library}")
        listed = subprocess.run(
            [sys.executable, "-c", _NAMES, str(module)], stdout=subprocess.PIPE, check=True, text=True,
            env={"LD_LIBRARY_PATH": folder},
        )  # fmt: skip
        members = (ast.literal_eval(line) for line in listed.stdout.splitlines())
        return {name + counts(name, text) for name, text in members}


def is_named(name: str) -> bool:
    """Return whether the backend has each word of `Class` or `Class.member`."""
    return name in _OTHERS or name[0].isupper() and _WORDS.issuperset(name.split("."))


def listing(wheels: Iterable[Path]) -> str:
    """Return the text of the listing."""
    listings = {re.search(r"-([0-9.]+)-", wheel.name)[1]: names(wheel) for wheel in wheels}
    versions = sorted(listings, key=lambda version: [int(part) for part in version.split(".")])
    lines = [" ".join(["versions", *versions])]
    members: dict[str, set[str]] = {}
    for name in sorted(set().union(*listings.values())):
        plain = name.partition("(")[0]
        owner, _, member = plain.partition(".")
        if member:
            members.setdefault(owner, set()).add(member)
        if is_named(plain):
            columns = "".join("x" if name in listings[version] else "-" for version in versions)
            lines.append(f"{columns} {name}")
    lines += [" ".join(["members", owner, *sorted(names)]) for owner, names in members.items()]
    return "\n".join(lines) + "\n"


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(folder: str) -> None:
    for package, versions in _PACKAGES.items():
        for version in versions:
            download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
            subprocess.run([*download, f"{package}=={version}"], check=True)
    LISTING.write_text(listing(Path(folder).glob("*.whl")))


if __name__ == "__main__":
    main(*sys.argv[1:])
