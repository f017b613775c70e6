"""What the package's code is checked against and ruff has no rule for."""

import ast

from lockstep.provenance.code_identity import SOURCES


def test_no_conditional_expression_is_an_operand_of_another() -> None:
    nested = []
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.IfExp):
                if any(isinstance(part, ast.IfExp) for part in (node.test, node.body, node.orelse)):
                    nested.append(f"{path.relative_to(SOURCES)}:{node.lineno}")
    assert nested == [], "write statements or a function instead of `a if x else b if y else c`"
