"""Telling two expressions apart by their values in floating point, so that only look-alikes need computer algebra."""

from __future__ import annotations

import cmath
import dataclasses
import functools
import math
import re

from pods_envs.verifiers.rational import TOKENS, NotRationalError, Parser

_EPSILON = 2.0**-52
_MARGIN = 1e-9  # two values that differ by less, relative to the larger, are left to computer algebra
_LARGEST = 1e100  # beyond, a product of two could overflow


def differ(one: str, other: str) -> bool:
    r"""Whether two expressions in cleaned LaTeX (see latex.clean) certainly have different values.

    Both are evaluated at one positive point, where every variable has a value of its own, with a bound on the
    rounding error. Only numbers, single letters, `\pi`, `i`, `e`, roots and `+ - * / ^` are understood, so False
    says nothing.
    """
    try:
        a, b = _Parser(one).parse(), _Parser(other).parse()
    except (NotRationalError, ArithmeticError, RecursionError):
        return False
    gap = abs(a.value - b.value)
    return bool(gap > 4 * (a.error + b.error) + _MARGIN * max(abs(a.value), abs(b.value)))


@dataclasses.dataclass(slots=True)
class _Value:
    """A complex number and a bound on how far it is from the true one."""

    value: complex
    error: float

    def __add__(self, other: _Value) -> _Value:
        value = self.value + other.value
        return _Value(value, self.error + other.error + _EPSILON * abs(value))

    def __sub__(self, other: _Value) -> _Value:
        return self + -other

    def __neg__(self) -> _Value:
        return _Value(-self.value, self.error)

    def __mul__(self, other: _Value) -> _Value:
        value = self.value * other.value
        error = abs(self.value) * other.error + abs(other.value) * self.error + self.error * other.error
        return _Value(value, error + 3 * _EPSILON * abs(value))


class _Parser(Parser):
    token = re.compile(rf"{TOKENS}|(?P<name>\\pi(?![a-zA-Z])|[A-Za-z])")
    primary_tokens = (*Parser.primary_tokens, "\\pi", *"abcdefghijklmnopqrstuvwxyzABCDFGHJKLMNOPQRSTUVWXYZ")

    def __init__(self, text: str):
        super().__init__(text)
        before = [("", ""), *self.tokens]  # the space of `\pi r`
        self.tokens = [
            t
            for t, b in zip(self.tokens, before, strict=False)
            if t[1] != " " or b[0] not in ("command", "name")
        ]

    def name(self, token: str) -> _Value:
        # f(x) may be a product or a function, dx a differential; sympy may know E and I.
        if token not in self.primary_tokens or (token.isalpha() and self.peek() == "(") or token == "d":
            raise NotRationalError(self.text)
        constants = {"\\pi": math.pi, "e": math.e, "i": 1j}
        value = (
            constants[token] if token in constants else 0.4 + 2.2 * math.modf(ord(token) * 0.6180339887)[0]
        )
        return _Value(value, _EPSILON * abs(value))

    def number(self, token: str) -> _Value:
        if "e" in token.lower():  # 2e-1 may be 2e - 1
            raise NotRationalError(self.text)
        value = float(token.replace(",", ""))
        return self.checked(_Value(value, _EPSILON * abs(value)))

    def repeating(self, token: str) -> _Value:
        value = float(super().repeating(token))
        return _Value(value, _EPSILON * abs(value))

    def checked(self, value: _Value) -> _Value:
        if not abs(value.value) < _LARGEST:
            raise NotRationalError(self.text)
        return value

    def quotient(self, numerator: _Value, denominator: _Value) -> _Value:
        size = abs(denominator.value)
        if not size > 4 * denominator.error or size < 1 / _LARGEST:
            raise NotRationalError(self.text)
        value = numerator.value / denominator.value
        error = 2 * (numerator.error + abs(value) * denominator.error) / size
        return self.checked(_Value(value, error + 3 * _EPSILON * abs(value)))

    def raised(self, base: _Value, exponent: _Value) -> _Value:
        power = exponent.value.real
        if exponent.value == power and power in (1, 2, 3, 4, 5, 6) and exponent.error <= power * _EPSILON:
            return functools.reduce(lambda value, _: self.checked(value * base), range(int(power) - 1), base)
        product = self.checked(exponent * self.logarithm(base))
        if abs(product.value) > 200 or product.error > 0.1:
            raise NotRationalError(self.text)
        value = cmath.exp(product.value)
        return _Value(value, abs(value) * (2 * product.error + 4 * _EPSILON))

    def root(self, value: _Value, degree: int) -> _Value:
        return self.raised(value, _Value(1 / degree, _EPSILON))

    def logarithm(self, value: _Value) -> _Value:
        number = value.value.real
        # Of positive numbers only: sqrt(a/b) is sqrt(a)/sqrt(b) to everybody, although not where both are negative.
        if value.value != number or number <= 4 * value.error:
            raise NotRationalError(self.text)
        return _Value(math.log(number), 2 * value.error / number + 4 * _EPSILON)

    def factorial(self, value: _Value) -> _Value:
        raise NotRationalError(self.text)

    def binomial(self, n: _Value, k: _Value) -> _Value:
        raise NotRationalError(self.text)
