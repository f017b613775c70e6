"""What the package's code is checked against and ruff has no rule for."""

import ast

from lockstep.provenance.code_identity import SOURCES


def test_no_conditional_expression_is_an_operand_of_another() -> None:
    nested = [
        f"{name}:{node.lineno}"
        for name, path in sorted((str(path.relative_to(SOURCES)), path) for path in SOURCES.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.IfExp)
        and any(isinstance(part, ast.IfExp) for part in (node.test, node.body, node.orelse))
    ]
    assert nested == [], "write statements or a function instead of `a if x else b if y else c`"
