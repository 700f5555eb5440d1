"""A calculator as a tool, for GSM8K: ENVIRONMENT_CLASS=recipes/calculator.py:Calculator."""

import ast
import operator

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
# In so few characters no number takes long, and no nesting is too deep for Python.
LONGEST = 200
ALLOWED = "write only numbers, + - * / and parentheses"


def evaluate(node: ast.expr) -> int | float:
    """Returns the value of a syntax tree. Python executes nothing of it.

    Raises ValueError for all but numbers and the operators above, and ZeroDivisionError.
    """
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp() if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
        case ast.UnaryOp() if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](evaluate(node.operand))
    raise ValueError(ALLOWED)


class Calculator:
    """A calculator that the model may use as often as it wants before it answers."""

    def reset(self, **columns: object) -> None:
        """Begins an episode. The model gets the question of the dataset and nothing else."""

    def calculate(self, expression: str) -> str:
        """Calculates with numbers, + - * / and parentheses.

        Args:
            expression: What to calculate, such as "(17 + 3) * 2.5".

        Returns:
            The value, such as "50".
        """
        if len(expression) > LONGEST:
            raise ValueError(f"the expression is longer than {LONGEST} characters")
        try:
            tree = ast.parse(expression.strip(), mode="eval")
        except SyntaxError:
            raise ValueError(ALLOWED) from None
        value = evaluate(tree.body)
        return str(value) if isinstance(value, int) else f"{value:.12g}"
