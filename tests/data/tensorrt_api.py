"""Lists the Python API of TensorRT versions: which class, method and enum member is in which.

    python tests/data/tensorrt_api.py WHEEL...       writes tensorrt_api.txt beside this file

The wheels are `tensorrt_cu12_bindings` and, from 10.15 on, `tensorrt_cu13_bindings`, all for the Python that runs this.
Their extension module is imported for its names alone, beside empty fakes of the libraries that it links: no GPU
and no library is needed, but gcc and binutils.
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LISTING = Path(__file__).with_suffix(".txt")
_NAMES = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("tensorrt.tensorrt", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
for name, value in vars(module).items():
    if not name.startswith("_"):
        print(name)
        if isinstance(value, type):
            own = (member for member in vars(value) if not member.startswith("_"))
            print(*(f"{name}.{member}" for member in own if not (hasattr(value, "__members__") and member in ("name", "value"))), sep="\\n")
"""  # noqa: E501


def names(wheel: Path) -> set[str]:
    """`Class` and `Class.member` of all that the wheel's extension module defines; what a class inherits stands with
    its base."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        module = Path(
            archive.extract(next(name for name in archive.namelist() if name.endswith("/tensorrt.so")), folder)
        )
        said = lambda *command: subprocess.run(command, check=True, capture_output=True, text=True).stdout
        undefined = [line.split()[-1] for line in said("nm", "-D", "--undefined-only", str(module)).splitlines()]
        # not the C and C++ libraries'
        wanted = [name for name in undefined if re.search("nv|Nv|Infer|Plugin", name) and "@" not in name]
        code = Path(folder) / "fake.c"
        code.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in wanted))
        for library in sorted(set(re.findall(r"\[(libnv\S+?)\]", said("readelf", "-d", str(module))))):
            said("gcc", "-shared", "-fPIC", "-o", str(Path(folder) / library), str(code), f"-Wl,-soname,{library}")
        listed = subprocess.run(
            [sys.executable, "-c", _NAMES, str(module)],
            stdout=subprocess.PIPE,
            check=True,
            text=True,
            env={"LD_LIBRARY_PATH": folder},
        )
        return {line for line in listed.stdout.splitlines() if line}


def main(wheels: list[str]) -> None:
    listings = {re.search(r"-([0-9.]+)", Path(wheel).name)[1]: names(Path(wheel)) for wheel in wheels}
    versions = sorted(listings, key=lambda version: [int(part) for part in version.split(".")])
    lines = [" ".join(["versions", *versions])]
    for name in sorted(set().union(*listings.values())):
        found = "".join("x" if name in listings[version] else "-" for version in versions)
        lines.append(f"{found} {name}")
    LISTING.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
