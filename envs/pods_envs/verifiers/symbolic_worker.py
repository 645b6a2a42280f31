"""Computer algebra for worker.py: sympy and math-verify's LaTeX parser. It imports nothing of ours."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig

DIGITS = 50
NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="none", equations=False
)
CONVERSION = ConversionConfig(
    interpret_as_mixed_fractions=True,
    interpret_simple_eq_as_assignment=False,
    interpret_contains_as_eq=True,
    lowercase_symbols=False,
)


def parse(text: str) -> Any:
    """LaTeX as a sympy object with exact numbers and `i` for the imaginary unit."""
    parsed = latex2sympy(text, normalization_config=NORMALIZATION, conversion_config=CONVERSION)
    if isinstance(parsed, sympy.Basic):
        exact = {number: sympy.Rational(str(number)) for number in parsed.atoms(sympy.Float)}
        parsed = parsed.xreplace(exact).subs(sympy.Symbol("i"), sympy.I)
    return parsed


# Sign and size of the variables at each point, the most telling first: roots are defined near and far from zero only.
POINTS = (
    (1, 1),
    (1, 1),
    (-1, 1),
    (-1, 1),
    (1, 0.25),
    (1, 10),
    (1, 1),
    (1, 1),
    (1, 0.25),
    (1, 10),
    (1, 1),
    (1, 100),
)
ENOUGH = 6  # points at which both have a value


def points(expressions: Sequence[Any]) -> Iterator[tuple[int, dict[Any, Any]]]:
    """Values for the variables, and whether some are negative (-1), all whole numbers (0), or neither (1)."""
    names = sorted({symbol for expression in expressions for symbol in expression.free_symbols}, key=str)
    rng = random.Random(0)
    for number, (sign, size) in enumerate(POINTS if names else POINTS[:1]):
        values = {}
        for index, name in enumerate(names):
            # Negative are every other one, then the others: sqrt(x^2 y) is not x sqrt(y).
            negative = sign < 0 and (len(names) == 1 or (number + index) % 2 == 0)
            values[name] = sympy.Rational(size) * sympy.Rational(
                rng.randint(20, 300), -97 if negative else 97
            )
        yield sign, values
    for start in (2, 3, 4, 5, 6) if names else ():  # (-1)^n is real nowhere else
        yield 0, {name: sympy.Integer(start + index) for index, name in enumerate(names)}


def real_roots(expression: Any, values: dict[Any, Any]) -> Any:
    """The expression at a point, with real roots; None where it has an even root of a negative number.

    sqrt(a)*sqrt(b) is sqrt(a*b) to everybody, although not where both are negative; the cube root of -8 is -2.
    """
    for power in sorted(expression.atoms(sympy.Pow), key=lambda power: power.count_ops()):
        if not power.exp.is_Rational or power.exp.is_integer:
            continue
        base = power.base.xreplace(values).evalf(DIGITS)
        if not base.is_negative:
            continue
        if power.exp.q % 2 == 0:
            return None
        expression = expression.xreplace({power: (-1) ** power.exp.p * (-power.base) ** power.exp})
    return expression


def numeric(expression: Any, values: dict[Any, Any]) -> Any:
    """The value to DIGITS digits, or None where it has none."""
    if not expression.has(sympy.I):
        constant = not expression.free_symbols
        rooted = real_roots(expression, values)
        if rooted is None and not constant:
            return None
        expression = expression if rooted is None else rooted
    value = expression.xreplace(values).evalf(DIGITS)
    if not (value.is_number and value.is_finite):
        return None
    floats = value.atoms(sympy.Float)
    if floats and all(number._prec == 1 for number in floats):
        return sympy.Integer(0)  # not one digit is certain: sin(pi)
    return value


def close(one: Any, other: Any) -> bool:
    """Whether two numbers agree in all but the last ten digits."""
    difference = abs(one - other).evalf(DIGITS)
    return bool(difference <= 10 ** sympy.Integer(10 - DIGITS) * max(abs(one), abs(other)).evalf(DIGITS))


def equal_values(gold: Any, response: Any) -> bool:
    """Identity of two expressions, tested at points; far cheaper and more often right than simplification."""
    if gold == response:
        return True
    if not (isinstance(gold, sympy.Expr) and isinstance(response, sympy.Expr)):
        return equal_generally(gold, response)
    names = gold.free_symbols | response.free_symbols
    imaginary = gold.has(sympy.I) or response.has(sympy.I)
    tested, real = 0, False
    for sign, values in points((gold, response)):
        if sign == 0 and real:
            break
        one, other = numeric(gold, values), numeric(response, values)
        # Where one has a value and the other has none, whole numbers must not make them equal.
        real = real or (sign != 0 and (one is None) != (other is None))
        if one is None or other is None:
            continue
        # sqrt(x**3) is x*sqrt(x) to everybody, although not for negative x, where both are complex.
        if (sign <= 0 or not imaginary) and names and not (one.is_real and other.is_real):
            continue
        if not close(one, other):
            return False
        tested += 1
        real = real or sign != 0
        if tested == ENOUGH:
            break
    return True if tested else equal_generally(gold, response)


def equal_equations(gold: Any, response: Any) -> bool:
    """Whether the differences of the two sides are multiples of each other."""
    if not (isinstance(gold, sympy.Eq) and isinstance(response, sympy.Eq)):
        return equal_generally(gold, response)
    one, other = gold.lhs - gold.rhs, response.lhs - response.rhs
    ratios = []
    for _, values in points((one, other)):
        pair = numeric(one, values), numeric(other, values)
        if None not in pair and pair[1] != 0:
            ratios.append(pair[0] / pair[1])
    return len(ratios) > 2 and ratios[0] != 0 and all(close(ratios[0], ratio) for ratio in ratios[1:])


def equal_generally(gold: Any, response: Any) -> bool:
    """math-verify's own comparison, for sets and inequalities."""
    import math_verify  # rarely needed, and slow to import

    return bool(
        math_verify.verify(
            gold, response, float_rounding=DIGITS, numeric_precision=DIGITS, timeout_seconds=None
        )
    )


COMPARISONS = {"value": equal_values, "equation": equal_equations, "general": equal_generally}


def warm() -> None:
    """Fills the parser's tables, which every fork then has."""
    for text in (r"\frac{1}{2}x^{2}+\sqrt{3}", r"2\pi r-\sin 3", "3+4i", "y=2x", r"\log_2 3", "(a+b)!"):
        equal_values(parse(text), parse(text + "+1"))


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Whether `gold` and `response` are equal, compared as `kind` says."""
    try:
        parsed_gold = parse(request["gold"])
        parsed_response = parse(request["response"])
    except MemoryError:
        raise
    except Exception:
        return {"method": "unparsable"}
    try:
        return {"value": bool(COMPARISONS[request["kind"]](parsed_gold, parsed_response))}
    except MemoryError:
        raise
    except Exception as error:
        return {"method": "unparsable", "error": repr(error)[:200]}
