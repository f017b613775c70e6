"""The pages: links lead somewhere, lines are short, generated ones are of their records, the glossary is small."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import yaml
from benchmarks import batches, certify, chart, models
from benchmarks.__main__ import bench
from docs import draw_packages

from faults import page as planted_faults
from faults.__main__ import faults
from lockstep.artifacts.files import read_json
from lockstep.cli.main import main as lockstep
from lockstep.provenance.varied import varied_surroundings
from lockstep_serve.cli.serve import serve

REPOSITORY = Path(__file__).resolve().parents[3]
RECORDS = REPOSITORY / "records"
GENERATED = {RECORDS / name for name in ("models.md", "faults.md", "certify.md", "gpu/batches.md")}
EVERY_PAGE = [
    *sorted(REPOSITORY.glob("*.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *sorted((REPOSITORY / "examples").rglob("*.md")),
    *sorted(RECORDS.rglob("*.md")),
    *sorted((REPOSITORY / "src").glob("*/README.md")),
]
PAGES = [page for page in EVERY_PAGE if page not in GENERATED]
GENERATED_PART = re.compile(r"<!-- (\w+): written by .*?<!-- /\1 -->", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def name(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def prose(text: str) -> str:
    """Return the page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_somewhere(page: Path, link: str) -> bool:
    if workflow := re.match(r"\.\./\.\./actions/workflows/([\w.]+)", link):  # from where the host shows the README
        return (REPOSITORY / ".github" / "workflows" / workflow[1]).is_file()
    file, _, anchor = link.partition("#")
    target = (page.parent / file).resolve() if file else page
    return target.exists() and (not anchor or anchor in anchors(target))


def test_relative_links_lead_to_files_and_headings() -> None:
    count = 0
    for page in PAGES:
        links = LINK.findall(prose(page.read_text(encoding="utf-8")))
        count += len(links)
        assert not [link for link in links if "://" not in link and not leads_somewhere(page, link)], name(page)
    assert count > 100


def test_lines_have_at_most_120_characters() -> None:
    """In generated pages, rows of tables may be longer."""
    long = []
    for page in EVERY_PAGE:
        text = page.read_text(encoding="utf-8")
        lines = GENERATED_PART.sub("", text).splitlines() if page in PAGES else []
        lines += [line for line in prose(text).splitlines() if not line.startswith("|")]
        long += [(name(page), line) for line in lines if len(line) > 120]
    assert not long


def words(*pages: Path) -> int:
    """Return how many words the pages have, blocks of code counted, as `wc -w` does."""
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


def test_the_readme_and_the_manual_stay_short() -> None:
    assert words(REPOSITORY / "README.md") <= 1_000
    assert words(*(REPOSITORY / "docs").glob("*.md")) <= 30_000


def test_pages_of_packages_name_files_that_are_there() -> None:
    pages = sorted((REPOSITORY / "src").glob("*/README.md"))
    missing = []
    for page in pages:
        for file in re.findall(r"`([\w/]+(?:\.(?:py|cu)|/))`", page.read_text(encoding="utf-8")):
            if not any((folder / file).exists() for folder in (page.parent, page.parent.parent, REPOSITORY)):
                missing.append((page.parent.name, file))
    assert len(pages) == 3 and not missing


def test_the_graph_of_packages_is_current() -> None:
    page = draw_packages.PAGE.read_text(encoding="utf-8")
    assert page == draw_packages.page(page, draw_packages.packages()), "run: python docs/draw_packages.py"


def test_generated_pages_are_what_their_records_give(tmp_path: Path) -> None:
    planted = [read_json(RECORDS / "bench" / name) for name in planted_faults.RECORDS]
    assert (RECORDS / "faults.md").read_text() == planted_faults.render(planted)
    (tmp_path / "gpu").symlink_to(RECORDS / "gpu")
    page = models.write_page(read_json(RECORDS / "bench" / "models.json"), tmp_path)
    assert (RECORDS / "models.md").read_text() == page.read_text()
    for page, text in chart.pages():
        assert page.read_text(encoding="utf-8") == text, "run: python -m benchmarks.chart"
    certified = [read_json(path) for path in sorted((RECORDS / "bench").glob("certify-*.json"))]
    assert (RECORDS / "certify.md").read_text() == certify.page(certified)
    assert (RECORDS / "gpu" / "batches.md").read_text() == batches.page(read_json(RECORDS / "gpu" / "batches.json"))


def test_the_table_of_varied_builds_is_what_reproduce_varies() -> None:
    page = (REPOSITORY / "docs" / "reproduce.md").read_text(encoding="utf-8")
    for number in (1, 2, 3):
        varied = varied_surroundings(number)
        values = {"working folder": varied.folder, "umask": f"{varied.umask:03o}", **varied.variables}
        values["PATH"] = values["PATH"].partition(":")[0]
        for name, value in values.items():
            (row,) = re.findall(rf"^\| `?{name}`? \|(.*)\|$", page, re.MULTILINE)
            assert value in row.split("|")[number - 1], name


def test_every_record_stands_in_their_index_and_the_manual_holds_none() -> None:
    index = RECORDS / "README.md"
    linked = {(index.parent / link).resolve() for link in LINK.findall(index.read_text(encoding="utf-8"))}
    records = {path for path in RECORDS.rglob("*") if path.is_file() and path.suffix != ".svg"}
    assert records - {index} <= linked
    assert not [path for path in (REPOSITORY / "docs").rglob("*") if path.suffix in (".json", ".log")]


PROGRAMS = {"lockstep": lockstep, "python -m benchmarks": bench, "make faults": faults}
COMMAND = re.compile(r"(?:^|[\s;&/])(lockstep|python -m benchmarks) ([a-z][\w-]*[^|&;#]*)")
FAULTS = re.compile(r'(make faults) ARGS="([^"]*)"')
LINE = re.compile(r"^[ $]*\S*(?:lockstep|python -m benchmarks) .*$", re.MULTILINE)
# The changelog and records name files that are gone: they stay as they were written.
OF_TODAY = [page for page in PAGES if RECORDS not in page.parents]


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """Return the commands of a page, in blocks and in the middle of lines: the program and its words."""
    text = page.read_text(encoding="utf-8")
    quoted = [" ".join(words.split()) for words in re.findall(r"`([^`]+)`", prose(text))]
    lines = [*LINE.findall(text.replace("\\\n", " ")), *quoted]
    pairs = []
    for line in lines:
        pairs += [*COMMAND.findall(line), *FAULTS.findall(line)]
    return [(program, words.split()) for program, words in pairs]


def test_workflows_for_ci_name_files_and_commands_that_are_there() -> None:
    steps = []
    for path in (REPOSITORY / "examples" / "ci").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            steps += [step["run"] for step in job["steps"] if "run" in step]
    for step in steps:
        program, *words = [word for word in shlex.split(step) if not word.startswith("LOCKSTEP_CACHE=")]
        assert program in ("make", ".venv/bin/python", ".venv/bin/snakemake", ".venv/bin/lockstep")
        assert program != ".venv/bin/lockstep" or words[0] in lockstep.commands
        files = [word for word in words if "/" in word and not word.startswith("gpu/")]  # which the run makes
        assert all((REPOSITORY / file).is_file() for file in files), words
    assert len(steps) == 7


def test_commands_have_the_options_that_pages_give_them() -> None:
    for page in OF_TODAY:
        for program, words in commands(page):
            node: click.Command = PROGRAMS[program]
            for word in words:
                if isinstance(node, click.Group):
                    node = node.get_command(click.Context(node), word) or node
            node_options = {"--help"}
            for param in node.params:
                node_options.update(param.opts, param.secondary_opts)
            if "--" in words:  # the rest is for another program
                words = words[: words.index("--")]
            options = {word.partition("=")[0] for word in words if re.fullmatch(r"--[a-z][a-z0-9-]*(=.*)?", word)}
            has_help = not isinstance(node, click.Group) or "--help" in words or page.name == "CHANGELOG.md"
            assert has_help and options <= node_options, f"{name(page)}: {program} {' '.join(words)}"


def test_every_page_stands_in_the_index() -> None:
    index = REPOSITORY / "docs" / "README.md"
    linked = {(index.parent / link).resolve() for link in LINK.findall(index.read_text(encoding="utf-8"))}
    assert set((REPOSITORY / "docs").glob("*.md")) - {index} <= linked


def test_the_page_of_the_server_has_every_option_with_its_default() -> None:
    page = (REPOSITORY / "docs" / "serving.md").read_text(encoding="utf-8")
    defaults = dict(re.findall(r"^\| `(--[a-z-]+)[^|]*\|([^|]*)\|", page, re.MULTILINE))
    options = {param.opts[0]: param.default for param in serve.params if isinstance(param, click.Option)}
    assert defaults.keys() == options.keys()
    numbers = {name: value for name, value in options.items() if type(value) in (int, float)}
    assert numbers and {name: float(defaults[name]) for name in numbers} == numbers


def test_the_example_of_another_torch_is_of_the_pinned_version() -> None:
    (pin,) = re.findall(r"^(torch==.+)$", (REPOSITORY / "envs" / "requirements.txt").read_text(), re.MULTILINE)
    for path in ("README.md", "CHANGELOG.md", "Makefile", "docs/install.md"):
        assert set(re.findall(r"torch==[\d.]+", (REPOSITORY / path).read_text(encoding="utf-8"))) == {pin}, path
