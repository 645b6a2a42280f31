"""The worker process for computer algebra: pool.py starts it as a script, so it imports nothing of ours.

A supervisor imports sympy and math-verify's LaTeX parser once and forks a child that answers requests, one
JSON line each, on the inherited pipes. The kernel kills the child when its timer fires or its memory is used
up, whatever C code it is in; the supervisor says why and forks the next one, which takes milliseconds.
"""

import json
import sys

if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[2])  # as in the process that started us

import os
import random
import resource
import signal
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig

OUT_OF_MEMORY, RENEW = 3, 4  # exit codes of the child; 0: the requests have ended
REQUESTS_PER_CHILD = 1000  # sympy's caches grow
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


def points(expressions: Sequence[Any]) -> Iterator[tuple[int, dict[Any, Any]]]:
    """Values for the variables: four times positive ones, twice negative ones."""
    names = sorted({symbol for expression in expressions for symbol in expression.free_symbols}, key=str)
    rng = random.Random(0)
    for sign in (1, 1, 1, 1, -1, -1) if names else (1,):
        yield sign, {name: sympy.Rational(sign * rng.randint(20, 300), 97) for name in names}


def numeric(expression: Any, values: dict[Any, Any]) -> Any:
    """The value to DIGITS digits, or None where it has none."""
    value = expression.subs(values, simultaneous=True).evalf(DIGITS)
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
    tested = 0
    for sign, values in points((gold, response)):
        one, other = numeric(gold, values), numeric(response, values)
        if one is None or other is None:
            continue
        # sqrt(x**3) is x*sqrt(x) to everybody, although not for negative x, where both are complex.
        if sign < 0 and not (one.is_real and other.is_real):
            continue
        if not close(one, other):
            return False
        tested += 1
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


def answer(kind: str, gold: str, response: str) -> dict[str, Any]:
    """The reply to one request."""
    try:
        parsed_gold = parse(gold)
        parsed_response = parse(response)
    except MemoryError:
        raise
    except Exception:
        return {"method": "unparsable"}
    try:
        return {"method": "symbolic", "equal": bool(COMPARISONS[kind](parsed_gold, parsed_response))}
    except MemoryError:
        raise
    except Exception as error:
        return {"method": "unparsable", "error": repr(error)[:200]}


def serve(requests: BinaryIO, replies: int) -> None:
    """Answers requests until they end; runs in the child."""
    for _ in range(REQUESTS_PER_CHILD):
        line = requests.readline()
        if not line:
            os._exit(0)
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])  # SIGALRM is not caught: it kills
        try:
            reply = answer(request["kind"], request["gold"], request["response"])
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(replies, {"id": request["id"], **reply})
    os._exit(RENEW)


def send(replies: int, message: dict[str, Any]) -> None:
    """Writes one line to the descriptor `replies`."""
    os.write(replies, json.dumps(message).encode() + b"\n")


def main() -> None:
    """The supervisor."""
    replies = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not look like a reply
    megabytes = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for warm in (r"\frac{1}{2}x^{2}+\sqrt{3}", r"2\pi r-\sin 3", "3+4i", "y=2x", r"\log_2 3", "(a+b)!"):
        equal_values(parse(warm), parse(warm + "+1"))  # fills the parser's tables before the fork
    send(replies, {"method": "ready"})
    while True:
        child = os.fork()
        if child == 0:
            try:
                serve(os.fdopen(os.dup(0), "rb", buffering=0), replies)
            finally:
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return
        if code != RENEW:
            methods = {-signal.SIGALRM: "timeout", OUT_OF_MEMORY: "memory", -signal.SIGKILL: "memory"}
            send(replies, {"method": methods.get(code, "error")})


if __name__ == "__main__":
    main()
