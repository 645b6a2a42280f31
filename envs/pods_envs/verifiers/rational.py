"""The exact value of arithmetic: integers, decimals, fractions, mixed numbers, powers, exact roots."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

MAX_BITS = 20_000  # of a numerator or denominator: about 6,000 digits
MAX_DEPTH = 60
MAX_LENGTH = 5_000

_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+\.?\d*(?:[eE][+-]?\d{1,9}(?!\d))?|\.\d+")
TOKENS = (
    rf"(?P<repeating>\d{{0,99}}\.\d{{0,99}}\\overline\{{\d{{1,99}}\}})|(?P<number>{_NUMBER.pattern})"
    r"|(?P<command>\\(?:frac|sqrt|binom|cdot|times|div)(?![a-zA-Z]))|(?P<symbol>[-+*/^!(){}\[\] ])"
)
_PROPER = re.compile(r"\\frac\{(\d+)\}\{(\d+)\}| (\d+)/(\d+)(?![\d.])")


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
    if text.isdecimal() and len(text) < 4000:
        return Fraction(int(text))
    return Parser(text).parse()


class Parser:
    """Recursive descent; one method a level of precedence. The last few make the numbers: here, fractions."""

    token = re.compile(TOKENS)
    primary_tokens = ("(", "\\frac", "\\sqrt", "\\binom")  # what a product may leave the dot out before

    def __init__(self, text: str):
        self.tokens: list[tuple[str, str]] = []
        position = 0
        while position < len(text):
            match = self.token.match(text, position)
            if match is None:
                raise NotRationalError(text)
            self.tokens.append((str(match.lastgroup), match.group()))
            position = match.end()
        self.text = text
        self.position = 0
        self.depth = 0

    def parse(self) -> Any:
        """The value of all of the text."""
        value = self.sum()
        if self.position != len(self.tokens):
            raise NotRationalError(self.text)
        return value

    def peek(self, ahead: int = 0) -> str:
        """The token at the position, or `ahead` of it; empty at the end."""
        index = self.position + ahead
        return self.tokens[index][1] if index < len(self.tokens) else ""

    def take(self, *expected: str) -> bool:
        """Goes past the next token if it is one of these."""
        if self.peek() in expected:
            self.position += 1
            return True
        return False

    def expect(self, token: str) -> None:
        """Goes past a token that has to be there."""
        if not self.take(token):
            raise NotRationalError(self.text)

    def sum(self) -> Any:
        """product {(+ | -) product}."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotRationalError(self.text)
        value = self.product()
        while self.peek() in ("+", "-"):
            value = self.checked(value + self.product() if self.take("+") else value - self.skip().product())
        self.depth -= 1
        return value

    def skip(self) -> Parser:
        """Goes past a token."""
        self.position += 1
        return self

    def product(self) -> Any:
        """signed {(* | / | nothing) signed}."""
        value = self.signed()
        divided = False
        while True:
            if self.take("*", "\\cdot", "\\times"):
                value = self.checked(value * self.signed())
            elif self.take("/", "\\div"):
                value = self.quotient(value, self.signed())
                divided = True
            elif self.peek() in self.primary_tokens:
                if divided:  # 1/2(3): people disagree
                    raise NotRationalError(self.text)
                value = self.checked(value * self.power())
            else:
                return value

    def signed(self) -> Any:
        """{+ | -} power."""
        negative = False
        while self.peek() in ("+", "-"):
            negative ^= self.peek() == "-"
            self.position += 1
        value = self.power()
        return -value if negative else value

    def power(self) -> Any:
        """primary {!} [^ signed]."""
        value = self.primary()
        while self.take("!"):
            if self.peek() == "!":
                raise NotRationalError(self.text)
            value = self.factorial(value)
        if self.take("^"):
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise NotRationalError(self.text)
            value = self.raised(value, self.signed())
            self.depth -= 1
        return value

    def group(self) -> Any:
        """{ sum }."""
        self.expect("{")
        value = self.sum()
        self.expect("}")
        return value

    def primary(self) -> Any:
        """A number, a bracket, or a command with its arguments."""
        kind, token = self.tokens[self.position] if self.position < len(self.tokens) else ("end", "")
        self.position += 1
        if kind == "number":
            return self.mixed(self.number(token), token)
        if kind == "repeating":
            return self.repeating(token)
        if token in ("(", "{"):
            value = self.sum()
            self.expect(")" if token == "(" else "}")
            return value
        if token == "\\frac":
            numerator = self.group()
            return self.quotient(numerator, self.group())
        if token == "\\binom":
            n = self.group()
            return self.binomial(n, self.group())
        if token == "\\sqrt":
            degree = 2
            if self.take("["):
                kind, token = self.tokens[self.position] if self.position < len(self.tokens) else ("end", "")
                degree = int(token) if kind == "number" and token.isdecimal() and len(token) < 3 else 0
                self.position += 1
                self.expect("]")
            if degree < 2:
                raise NotRationalError(self.text)
            return self.root(self.group(), degree)
        return self.name(token)

    def mixed(self, whole: Any, token: str) -> Any:
        r"""`1\frac{1}{4}` and `1 1/4` are mixed numbers, not products, if the fraction is a proper one."""
        following = "".join(text for _, text in self.tokens[self.position : self.position + 7])
        match = _PROPER.match(following) if token.isdecimal() else None
        if match:
            top, bottom = (group for group in match.groups() if group is not None)
            if len(bottom) < 4000 and 0 < int(top) < int(bottom):
                self.position += 4 if following.startswith(" ") else 7
                return whole + self.quotient(self.number(top), self.number(bottom))
        return whole

    def number(self, token: str) -> Any:
        """The value of an integer or decimal."""
        if token.isdecimal() and len(token) < 4000:
            return Fraction(int(token))
        mantissa, _, exponent = token.replace(",", "").lower().partition("e")
        if len(mantissa) > 4000 or abs(int(exponent or 0)) > 4000:  # int(str) refuses more than 4,300 digits
            raise TooLargeError(token[:40])
        return Fraction(mantissa.rstrip(".") or "0") * Fraction(10) ** int(exponent or 0)

    def repeating(self, token: str) -> Any:
        r"""The value of `0.\overline{3}`."""
        whole, rest = token.split(".")
        start, cycle = rest[:-1].split("\\overline{")
        period = Fraction(int(cycle), 10 ** len(start) * (10 ** len(cycle) - 1))
        return Fraction(f"{whole or '0'}.{start}0") + period

    def name(self, token: str) -> Any:
        """The value of what is no number and no operator."""
        raise NotRationalError(self.text)

    def checked(self, value: Any) -> Any:
        """The value, if it is not too large."""
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise TooLargeError(self.text)
        return value

    def quotient(self, numerator: Any, denominator: Any) -> Any:
        """numerator / denominator."""
        if denominator == 0:
            raise NotRationalError(self.text)
        return self.checked(numerator / denominator)

    def factorial(self, value: Any) -> Any:
        """value!."""
        if value.denominator != 1 or value < 0:
            raise NotRationalError(self.text)
        if value > 1500:
            raise TooLargeError(self.text)
        return Fraction(math.factorial(int(value)))

    def binomial(self, n: Any, k: Any) -> Any:
        """n over k."""
        if n.denominator != 1 or k.denominator != 1 or not 0 <= k <= n <= 2000:
            raise NotRationalError(self.text)
        return Fraction(math.comb(int(n), int(k)))

    def raised(self, base: Any, exponent: Any) -> Any:
        """base ^ exponent."""
        if exponent.denominator != 1:
            if exponent.denominator > 100 or base < 0:
                raise NotRationalError(self.text)
            base, exponent = self.root(base, exponent.denominator), Fraction(exponent.numerator)
        if base in (0, 1, -1):
            if base == 0 and exponent <= 0:
                raise NotRationalError(self.text)
            return base if exponent % 2 else base * base
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent) > MAX_BITS:
            raise TooLargeError(self.text)
        return base ** int(exponent)

    def root(self, value: Any, degree: int) -> Any:
        """The root of a degree of at least 2."""
        if value < 0:
            if degree % 2 == 0:
                raise NotRationalError(self.text)
            return -self.root(-value, degree)
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
