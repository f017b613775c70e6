"""Count what slows a reader of Python: `places(text)` yields (kind, line) for each place that counts."""

import ast
import functools
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Names that say how a value came about, and not what it is.
NAMES_WITHOUT_A_THING = frozenset(
    "found each made given held told own said wanted asked kept brought taken got known seen others more most least "
    "few such there here one ones both whole left rest".split()
)

# Phrases for which the field has a word: "after", "accumulate", "rejected".
DIALECT = re.compile(
    r"\b(?:refused by name|which see|does? without|left alone|to be had|the like|so many|gone on with|hangs on"
    r"|no word of|in its place|at the most|in one line|few rows?|sameness|misfit|anew|thus|wherefrom|whose like"
    r"|therein|hereof|by name(?=[,.:])|behind (?:it|them|that|those|the)"
    r"|what (?:is|was|are|were|has|does|it|they|stands|lies|comes|goes)|how (?:they|it) (?:is|are) called"
    r"|(?:is|are|was|were) (?:asked for|made anew|taken along|brought|held to|said once|put beside|looked for)"
    r"|of (?:its|their) own|stands? (?:before|behind|in|beside|there|for)|lies? (?:in|beside|there|below)"
    r"|gives? (?:nothing|none|way)|leaves? (?:nothing|none)|beside)\b",
    re.IGNORECASE,
)
_SHORTEST_SENTENCE = 13  # characters: shorter texts are keys and names

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_HIDES_A_CONDITION = (ast.IfExp, ast.BoolOp, ast.BinOp, ast.comprehension, ast.keyword, ast.Subscript, *_COMPREHENSIONS)


def places(text: str) -> Iterator[tuple[str, int]]:
    tree = ast.parse(text)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        kind = _kind(node, parents.get(node))
        if kind is not None:
            yield kind, getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) >= _SHORTEST_SENTENCE:
            yield from (("dialect", node.lineno) for _ in DIALECT.finditer(node.value))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield "comment", token.start[0]
            yield from (("dialect", token.start[0]) for _ in DIALECT.finditer(token.string))


def count(folder: Path) -> tuple[Counter[str], int]:
    """Return the number of places of each kind in all Python files below `folder`, and the files' lines."""
    counts: Counter[str] = Counter()
    lines = 0
    for file in sorted(folder.rglob("*.py")):
        counts_of_file, lines_of_file = _count_file(file)
        counts.update(counts_of_file)
        lines += lines_of_file
    return counts, lines


@functools.cache  # a file is in its package, in the packages around that, and in `src`
def _count_file(file: Path) -> tuple[Counter[str], int]:
    text = file.read_text(encoding="utf-8")
    return Counter(kind for kind, _ in places(text)), text.count("\n")


def _kind(node: ast.AST, parent: ast.AST | None) -> str | None:
    match node:
        case ast.Assign(targets=[ast.Tuple(), *_], value=ast.Tuple()):
            return "tuple assignment"
        case ast.IfExp():
            return "nested condition" if isinstance(parent, _HIDES_A_CONDITION) else "condition"
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return "heavy comprehension" if _is_heavy(node) else None
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            return "name" if name in NAMES_WITHOUT_A_THING else None
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return "name" if name.strip("_") in NAMES_WITHOUT_A_THING else None
    return None


def _is_heavy(node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> bool:
    if len(node.generators) > 1 or any(len(generator.ifs) > 1 for generator in node.generators):
        return True
    return any(isinstance(inner, _COMPREHENSIONS) for inner in ast.walk(node) if inner is not node)
