"""The exact value of arithmetic: integers, decimals, fractions, mixed numbers, powers, exact roots."""

from __future__ import annotations

import math
import re
from fractions import Fraction

MAX_BITS = 20_000  # of a numerator or denominator: about 6,000 digits
MAX_DEPTH = 60
MAX_LENGTH = 5_000

_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+\.?\d*(?:[eE][+-]?\d{1,9}(?!\d))?|\.\d+")
_TOKEN = re.compile(
    rf"(?P<repeating>\d{{0,99}}\.\d{{0,99}}\\overline\{{\d{{1,99}}\}})|(?P<number>{_NUMBER.pattern})"
    r"|(?P<command>\\(?:frac|sqrt|binom|cdot|times|div)(?![a-zA-Z]))|(?P<symbol>[-+*/^!(){}\[\] ])"
)
_PROPER = re.compile(r"\\frac\{(\d+)\}\{(\d+)\}| (\d+)/(\d+)(?![\d.])")
_PRIMARY = ("(", "\\frac", "\\sqrt", "\\binom")  # what a product may leave the dot out before


class NotRationalError(ValueError):
    """The expression is none of ours: variables, irrational numbers, or no arithmetic at all."""


class TooLargeError(ValueError):
    """A number in the expression has more digits than any answer; it is not evaluated."""


def evaluate(text: str) -> Fraction:
    """The value of `text`, arithmetic in cleaned LaTeX (see latex.clean).

    Raises:
        NotRationalError: Not an arithmetic expression with a rational value, or a malformed one.
        TooLargeError: A number beyond MAX_BITS on the way.
    """
    if len(text) > MAX_LENGTH:
        raise TooLargeError(text[:40]) if text.isdecimal() else NotRationalError(text[:40])
    return _Parser(text).parse()


class _Parser:
    """Recursive descent; one method a level of precedence."""

    def __init__(self, text: str):
        self.tokens: list[tuple[str, str]] = []
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise NotRationalError(text)
            self.tokens.append((str(match.lastgroup), match.group()))
            position = match.end()
        self.text = text
        self.position = 0
        self.depth = 0

    def parse(self) -> Fraction:
        value = self.sum()
        if self.position != len(self.tokens):
            raise NotRationalError(self.text)
        return value

    def peek(self, ahead: int = 0) -> str:
        index = self.position + ahead
        return self.tokens[index][1] if index < len(self.tokens) else ""

    def take(self, *expected: str) -> bool:
        if self.peek() in expected:
            self.position += 1
            return True
        return False

    def expect(self, token: str) -> None:
        if not self.take(token):
            raise NotRationalError(self.text)

    def sum(self) -> Fraction:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotRationalError(self.text)
        value = self.product()
        while self.peek() in ("+", "-"):
            value = _check(value + self.product() if self.take("+") else value - self.skip().product())
        self.depth -= 1
        return value

    def skip(self) -> _Parser:
        self.position += 1
        return self

    def product(self) -> Fraction:
        value = self.signed()
        divided = False
        while True:
            if self.take("*", "\\cdot", "\\times"):
                value = _check(value * self.signed())
            elif self.take("/", "\\div"):
                divisor = self.signed()
                if divisor == 0:
                    raise NotRationalError(self.text)
                value = _check(value / divisor)
                divided = True
            elif self.peek() in _PRIMARY:
                if divided:  # 1/2(3): people disagree
                    raise NotRationalError(self.text)
                value = _check(value * self.power())
            else:
                return value

    def signed(self) -> Fraction:
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.peek() == "-"
            self.position += 1
        value = self.power()
        return -value if negative else value

    def power(self) -> Fraction:
        value = self.primary()
        while self.take("!"):
            if self.peek() == "!" or value.denominator != 1 or value < 0:
                raise NotRationalError(self.text)
            if value > 1500:
                raise TooLargeError(self.text)
            value = Fraction(math.factorial(int(value)))
        if self.take("^"):
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise NotRationalError(self.text)
            value = _power(value, self.signed())
            self.depth -= 1
        return value

    def group(self) -> Fraction:
        self.expect("{")
        value = self.sum()
        self.expect("}")
        return value

    def primary(self) -> Fraction:
        kind, token = self.tokens[self.position] if self.position < len(self.tokens) else ("end", "")
        self.position += 1
        if kind == "number":
            return self.mixed(_number(token), token)
        if kind == "repeating":
            whole, rest = token.split(".")
            start, cycle = rest[:-1].split("\\overline{")
            period = Fraction(int(cycle), 10 ** len(start) * (10 ** len(cycle) - 1))
            return _number(f"{whole or '0'}.{start}0") + period
        if token in ("(", "{"):
            value = self.sum()
            self.expect(")" if token == "(" else "}")
            return value
        if token == "\\frac":
            numerator, denominator = self.group(), self.group()
            if denominator == 0:
                raise NotRationalError(self.text)
            return _check(numerator / denominator)
        if token == "\\binom":
            n, k = self.group(), self.group()
            if n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n <= 2000:
                raise NotRationalError(self.text)
            return Fraction(math.comb(int(n), int(k)))
        if token == "\\sqrt":
            degree = Fraction(2)
            if self.take("["):
                degree = self.sum()
                self.expect("]")
            if degree.denominator != 1 or not 2 <= degree <= 100:
                raise NotRationalError(self.text)
            return _root(self.group(), int(degree))
        raise NotRationalError(self.text)

    def mixed(self, whole: Fraction, token: str) -> Fraction:
        r"""`1\frac{1}{4}` and `1 1/4` are mixed numbers, not products, if the fraction is a proper one."""
        following = "".join(text for _, text in self.tokens[self.position : self.position + 7])
        match = _PROPER.match(following) if token.isdecimal() else None
        if match:
            numerator, denominator = (_number(group) for group in match.groups() if group is not None)
            if 0 < numerator < denominator:
                self.position += 4 if following.startswith(" ") else 7
                return whole + numerator / denominator
        return whole


def _number(token: str) -> Fraction:
    mantissa, _, exponent = token.replace(",", "").lower().partition("e")
    if len(mantissa) > 4000 or abs(int(exponent or 0)) > 4000:  # int(str) refuses more than 4,300 digits
        raise TooLargeError(token[:40])
    return Fraction(mantissa.rstrip(".") or "0") * Fraction(10) ** int(exponent or 0)


def _check(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise TooLargeError
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if exponent.denominator > 100 or base < 0:
            raise NotRationalError
        base, exponent = _root(base, exponent.denominator), Fraction(exponent.numerator)
    if base in (0, 1, -1):
        if base == 0 and exponent <= 0:
            raise NotRationalError
        return base if exponent % 2 else base * base
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent) > MAX_BITS:
        raise TooLargeError
    return base ** int(exponent)


def _root(value: Fraction, degree: int) -> Fraction:
    if value < 0:
        if degree % 2 == 0:
            raise NotRationalError
        return -_root(-value, degree)
    return Fraction(_integer_root(value.numerator, degree), _integer_root(value.denominator, degree))


def _integer_root(value: int, degree: int) -> int:
    low, high = 0, 1 << (value.bit_length() // degree + 1)
    while low < high:  # the smallest integer whose power reaches value
        middle = (low + high) // 2
        if middle**degree < value:
            low = middle + 1
        else:
            high = middle
    if low**degree != value:
        raise NotRationalError
    return low
