"""A tool that computes. With a reward that checks answers, it needs no environment's class."""

import ast
import operator

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def calculate(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers with + - * / and brackets, such as "3 * (4 + 5)".
    """

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.BinOp):
            compute = OPERATORS[type(node.op)]
            return compute(value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        raise ValueError(f"cannot compute {ast.unparse(node)}")

    return f"{value(ast.parse(expression, mode='eval').body):g}"
