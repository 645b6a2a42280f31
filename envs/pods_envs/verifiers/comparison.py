"""Whether two answers in plain LaTeX (see latex.clean) are equal: structure first, then value by value."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

from pods_envs.verifiers.latex import closing, split, strip
from pods_envs.verifiers.rational import NotRationalError, evaluate
from pods_envs.verifiers.words import NO_UNIT, SCALE, SCALES, changes_its_number

MAX_SYMBOLIC = 1_000  # characters of an expression that computer algebra is asked about
MAX_ITEMS = 64  # of a list whose order does not matter
MAX_DEPTH = 20  # of tuples in tuples and the like
MAX_NESTING = 60  # of brackets of any kind

# (kind, gold, response) -> equal; kind is `value`, `equation` or `general` (sets, inequalities)
Symbolic = Callable[[str, str, str], bool]


class UnparsableError(ValueError):
    """The response's answer is malformed: a dangling sum, unbalanced brackets, a row of numbers, ..."""


class UndecidedError(Exception):
    """Only computer algebra can tell, and the caller did not provide it."""


def undecided(kind: str, gold: str, response: str) -> bool:
    """The `symbolic` argument of a caller that wants to know whether computer algebra is needed."""
    raise UndecidedError(f"{kind}: {gold} =? {response}")


def equal(gold: str, response: str, symbolic: Symbolic = undecided) -> bool:
    """Whether `response` is the answer `gold`.

    Args:
        gold: The reference in plain LaTeX.
        response: The answer to judge in plain LaTeX.
        symbolic: Decides what exact comparison cannot.

    Raises:
        UnparsableError: The response is malformed.
        rational.TooLargeError: It holds a number that is too large to evaluate.
        UndecidedError: By the default `symbolic`.
    """
    if _key(gold) == _key(response):
        return True
    if _nesting(response) > MAX_NESTING:
        raise UnparsableError("nested too deep")
    gold_value = _rational(gold)
    if gold_value is not None:
        response_value = _rational(response)
        if response_value is not None and (gold_value == response_value or "," not in gold + response):
            return gold_value == response_value
        if has_words(response) and _only_number(response) == gold_value:
            return True
    if _equal_nodes(_parse(gold), _parse(response), symbolic):
        return True
    if not _THOUSANDS_COMMA.search(gold + " " + response):
        return False
    # 100,200 is a number; where the other side is a list, it is one, too.
    gold_list, response_list = (_parse(_THOUSANDS_COMMA.sub(";", text)) for text in (gold, response))
    return gold_list.kind == response_list.kind == "list" and _equal_nodes(gold_list, response_list, symbolic)


# ---- structure ----


@dataclasses.dataclass(frozen=True)
class _Node:
    """A piece of an answer.

    `kind` is atom, list (bare, in any order), set, sequence (in brackets, ordered: tuple or interval), matrix
    or union.
    """

    kind: str
    text: str
    items: tuple[_Node, ...] = ()
    brackets: str = ""
    variable: str = ""  # of an interval that was written as an inequality


_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_IN_NUMBER = re.compile(r"(?<=\d),(?=\d{3}(?:,\d{3})*(?![\d,]))")
_THOUSANDS_COMMA = re.compile(r",(?=\d{3}(?!\d))")
_LIST_SEPARATOR = (
    r"[,;]|\\text\{,? ?(?:and|or|AND|OR) ?,?\}|(?<![A-Za-z\\])(?:and|or|AND|OR)(?![A-Za-z])"
    r"|\\(?:lor|vee|land)(?![a-zA-Z])"
)
_MATRIX = re.compile(
    r"\\begin\{([pbBvV]?|small)matrix\}(.*)\\end\{\1matrix\}|\\begin\{array\}(?:\{[lcr|]*\})(.*)\\end\{array\}",
    re.S,
)
_NAME = re.compile(r"(?:[A-Za-z]|\\[A-Za-z]+ ?)(?:_\{?\w+\}?)?'*")
_FUNCTION = re.compile(rf"(?:{_NAME.pattern}|f\^\{{-1\}})\([^()]*\)")
_STRUCTURE_NAME = re.compile(
    rf"{_NAME.pattern}|\((?:[A-Za-z]|\\[A-Za-z]+)(?:,(?:[A-Za-z]|\\[A-Za-z]+))+\)|\\(?:vec|overrightarrow|text)\{{\w+\}}"
)
_BOTH = re.compile(r"\\text\{,? ?and ?,?\}|(?<![A-Za-z\\])and(?![A-Za-z])|\\land(?![a-zA-Z])", re.I)
_EITHER = re.compile(r"\\text\{,? ?or ?,?\}|(?<![A-Za-z\\])or(?![A-Za-z])|\\(?:lor|vee)(?![a-zA-Z])", re.I)
_COORDINATES = ("xy", "xyz", "ab", "abc", "abcd")  # names whose order is known
_SETS = re.compile(r"\\(?:setminus|cap|mathbb|cup|le|ge|neq|in|notin|emptyset)(?![a-zA-Z])|[<>|]")
_BUILDER = re.compile(  # {x | 2 < x}
    rf"{_NAME.pattern}(?:\\in ?\\mathbb\{{R\}})?(?:\\mid(?![a-zA-Z])|:|\|) ?(.*(?:<|>|\\le|\\ge|\\in).*)",
    re.S,
)
_LESS = r"<|>|\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])"


def _key(text: str) -> str:
    """Texts with the same key are written the same."""
    return re.sub(r"(?<!\d) | (?!\d)", "", text) if " " in text else text


def _parse(text: str, depth: int = 0) -> _Node:
    if depth > MAX_DEPTH:
        raise UnparsableError("nested too deep")
    text = _unwrap_text(strip(text))
    if match := _MATRIX.fullmatch(text):
        body = match.group(2) if match.group(3) is None else match.group(3)
        rows = [row for _, row in split(body, r"\\\\") if row.strip()]
        items = tuple(
            _Node("sequence", row, tuple(_parse(cell, depth + 1) for _, cell in split(row, "&")))
            for row in rows
        )
        return _Node("matrix", text, items, "determinant" if match.group(1) in ("v", "V") else "")
    if len(parts := _list_parts(text)) > 1:
        items = tuple(item for part in parts for item in _flat(_parse(part, depth + 1)))
        return _Node("list", text, items)
    parts = _sides(text)
    if len(parts) == 2 and _STRUCTURE_NAME.fullmatch(parts[0]):  # (x,y)=(1,2), S=\{1,2\}
        node = _parse(parts[1], depth + 1)
        if node.kind in ("sequence", "set", "matrix", "union"):
            return dataclasses.replace(node, variable=parts[0] if parts[0].startswith("(") else "")
    if len(parts := [part for _, part in split(text, r"\\cup(?![a-zA-Z])")]) > 1:
        return _Node("union", text, tuple(_parse(part, depth + 1) for part in parts))
    if text == "\\mathbb{R}":
        return _Node("sequence", text, (_Node("atom", "-\\infty"), _Node("atom", "\\infty")), "()")
    opening = 2 if text.startswith("\\{") else 1 if text[:1] in ("(", "[") else 0
    if opening and closing(text, opening - 1) == len(text) - 1:
        end = len(text) - (2 if text.endswith("\\}") else 1)
        inner = text[opening:end]
        parts = [part for _, part in split(inner, "[,;]")]
        if opening == 2 and (built := _BUILDER.fullmatch(inner)):
            return _parse(built[1], depth + 1)
        if opening == 2 and "|" not in inner:
            items = tuple(item for part in parts if part.strip() for item in _flat(_parse(part, depth + 1)))
            return _Node("set", text, items)
        if opening == 1 and len(parts) > 1:
            return _Node(
                "sequence", text, tuple(_parse(part, depth + 1) for part in parts), text[0] + text[-1]
            )
        if text[0] + text[-1] == "()" or _MATRIX.fullmatch(inner):
            return _parse(inner, depth + 1)
    if re.search(r"\\[pm]{2}(?![a-zA-Z])", text):
        signs = [("+", "-"), ("-", "+")]
        both = (re.sub(r"\\(pm|mp)(?![a-zA-Z])", lambda m, s=s: s[m[1] == "mp"], text) for s in signs)  # type: ignore[misc]
        return _Node("list", text, tuple(_Node("atom", part) for part in both))
    return _interval(text, depth) or _Node("atom", text)


def _unwrap_text(text: str) -> str:
    r"""The content of `\\text{...}`; words of letters alone stay text, since `IV` is not a product."""
    match = re.fullmatch(r"\\text\{([^{}]*)\}", text)
    if match and re.fullmatch(
        r"(?:the )?(?:set of )?(?:all )?real(?: number)?s", match.group(1).strip(), re.I
    ):
        return "\\mathbb{R}"
    return match.group(1).strip() if match and not re.fullmatch(r" ?[A-Za-z]{2,} ?", match.group(1)) else text


def _list_parts(text: str) -> list[str]:
    if _THOUSANDS.fullmatch(text):
        return [text]
    if ";" in text:  # 1,000;2,000
        text = re.sub(
            rf"(?<![\d,.]){_THOUSANDS.pattern}(?![\d,])", lambda m: m.group().replace(",", ""), text
        )
    parts = [part.strip() for _, part in split(text, _LIST_SEPARATOR)]
    return [part for part in parts if part]


def _flat(node: _Node) -> tuple[_Node, ...]:
    return node.items if node.kind == "list" else (node,)


def _interval(text: str, depth: int) -> _Node | None:
    r"""`2\le x<5` as `[2,5)`, `x>3` as `(3,\infty)`, `x\in[2,5)` as `[2,5)`."""
    member = [part for _, part in split(text, r"\\in(?![a-zA-Z])")]
    if len(member) == 2 and _NAME.fullmatch(member[0]):
        return dataclasses.replace(_parse(member[1], depth + 1), variable=member[0].strip())
    parts = split(text, _LESS)
    if len(parts) not in (2, 3) or not all(side.strip() for _, side in parts):
        return None
    operators = [operator for operator, _ in parts[1:]]
    sides = [side.strip() for _, side in parts]
    if operators[0] in (">", "\\ge"):
        sides = sides[::-1]
        operators = [{">": "<", "\\ge": "\\le"}.get(operator, "mixed") for operator in operators[::-1]]
    if not {"<", "\\le"}.issuperset(operators):
        return None
    if len(sides) == 2:
        if _NAME.fullmatch(sides[0]):
            sides, operators = ["-\\infty", *sides], ["<", *operators]
        else:
            sides, operators = [*sides, "\\infty"], [*operators, "<"]
    if not _NAME.fullmatch(sides[1]):
        return None
    brackets = ("(" if operators[0] == "<" else "[") + (")" if operators[1] == "<" else "]")
    items = (_parse(sides[0], depth + 1), _parse(sides[2], depth + 1))
    return _Node("sequence", text, items, brackets, sides[1])


def _equal_nodes(gold: _Node, response: _Node, symbolic: Symbolic) -> bool:
    kinds = (gold.kind, response.kind)
    if gold.variable and response.variable and gold.variable != response.variable:
        return False
    if kinds == ("atom", "atom"):
        return _equal_atoms(gold.text, response.text, symbolic)
    if _key(gold.text) == _key(response.text):
        return True
    if kinds[0] == kinds[1] and gold.kind in ("sequence", "matrix"):
        return gold.brackets == response.brackets and _equal_items(gold.items, response.items, symbolic)
    if set(kinds) == {"list", "sequence"}:  # a pair may go without its parentheses, an interval may not
        brackets = gold.brackets + response.brackets
        infinite = any("\\infty" in item.text for item in (*gold.items, *response.items))
        if brackets != "()" or infinite or _EITHER.search((gold if gold.kind == "list" else response).text):
            return False
        return _equal_items(_in_order(gold), _in_order(response), symbolic)
    if {"list", "set", "union"}.issuperset(kinds):
        if kinds == ("set", "set"):
            return _cover(gold.items, response.items, symbolic)
        if (
            "union" in kinds
            and "list" in kinds
            and _BOTH.search((gold if kinds[0] == "list" else response).text)
        ):
            return False  # x>3 and x<5 is no union
        return _match(gold.items, response.items, symbolic)
    if "set" in kinds and "atom" in kinds and len(gold.items + response.items) == 1:
        if "\\emptyset" in (gold.text, response.text):
            return False
        return _equal_nodes((*gold.items, gold)[0], (*response.items, response)[0], symbolic)
    atom = gold.text if gold.kind == "atom" else response.text
    if "atom" in kinds and "list" not in kinds and _SETS.search(atom):
        return _ask(symbolic, "general", gold.text, response.text)
    return False


def _equal_items(gold: Sequence[_Node], response: Sequence[_Node], symbolic: Symbolic) -> bool:
    return len(gold) == len(response) and all(
        _equal_nodes(*pair, symbolic) for pair in zip(gold, response, strict=True)
    )


def _in_order(node: _Node) -> Sequence[_Node]:
    """The items of a list `y=1,x=2` by their names, where each has one of its own; else as they are."""
    named = [(sides[0], item) for item in node.items if len(sides := _sides(item.text)) == 2]
    names = {name for name, _ in named}
    if node.kind != "list" or len(names) < len(node.items) or "".join(sorted(names)) not in _COORDINATES:
        return node.items
    return [item for _, item in sorted(named, key=lambda pair: pair[0])]


def _cover(gold: Sequence[_Node], response: Sequence[_Node], symbolic: Symbolic) -> bool:
    """Whether each item of either set is in the other."""
    if max(len(gold), len(response)) > MAX_ITEMS:
        return False
    matched: set[int] = set()
    for item in gold:
        doubtful = []
        found = False
        for index, other in enumerate(response):
            try:
                if _equal_nodes(item, other, undecided):
                    matched.add(index)
                    found = True
            except UndecidedError:
                doubtful.append(index)
        for index in doubtful:
            if (not found or index not in matched) and _equal_nodes(item, response[index], symbolic):
                matched.add(index)
                found = True
        if not found:
            return False
    return len(matched) == len(response)


def _match(gold: Sequence[_Node], response: Sequence[_Node], symbolic: Symbolic) -> bool:
    """Whether each item of `gold` has a partner of its own in `response` and none is left over."""
    if len(gold) != len(response) or len(gold) > MAX_ITEMS:
        return False
    left = list(response)
    for item in gold:
        doubtful = []
        for other in left:
            try:
                if _equal_nodes(item, other, undecided):
                    left.remove(other)
                    break
            except UndecidedError:
                doubtful.append(other)
        else:
            partner = next((other for other in doubtful if _equal_nodes(item, other, symbolic)), None)
            if partner is None:
                return False
            left.remove(partner)
    return True


# ---- equations ----


def _equal_atoms(gold: str, response: str, symbolic: Symbolic) -> bool:
    if _key(gold) == _key(response):
        return True
    golds, responses = _sides(gold), _sides(response)
    if not all(responses):
        raise UnparsableError(f"an equation with an empty side: {response}")
    if len(golds) == 1 and len(responses) == 1:
        return _equal_values(gold, response, symbolic)
    if len(golds) == 1:
        values = responses[1:] if _is_label(responses[0]) else responses
        values = values[:-1] if len(values) > 1 and _NAME.fullmatch(values[-1]) else values  # 42=x
        return _all_equal(gold, values, symbolic)
    if not any(_has_variables(side) for side in golds):  # 0.56=56\%
        return any(_all_equal(side, responses, symbolic) for side in golds)
    named = _NAME.fullmatch(golds[0]) or _FUNCTION.fullmatch(golds[0])
    if len(responses) == 1:
        return named is not None and _equal_values(golds[-1], response, symbolic)
    if named and _same_name(golds[0], responses[0]):
        return _all_equal(golds[-1], responses[1:], symbolic)
    if len(golds) == len(responses) == 2:
        return _ask(symbolic, "equation", gold, response)
    return False


def _sides(text: str) -> list[str]:
    return [side.strip() for _, side in split(text, r":?=|\\(?:approx|equiv)(?![a-zA-Z])")]


def _all_equal(gold: str, sides: Sequence[str], symbolic: Symbolic) -> bool:
    return all(_equal_values(gold, side, symbolic) for side in sides)


def _is_label(side: str) -> bool:
    r"""Whether the left side of an equation names what is asked for: `x`, `f(x)`, `a+b`, `\text{Total}`.

    A sum with a constant term, as in `2x-y-18=0`, does not: that is an equation, and 0 is not its answer.
    """
    constant = any(_rational(term) is not None for _, term in split(side, r"[-+]") if term)
    return _has_variables(side) and not constant


def _has_variables(side: str) -> bool:
    return (
        re.search(r"[A-Za-z]", re.sub(r"\\(?:frac|d?sqrt|pi|cdot|times|div|binom)(?![a-zA-Z])", "", side))
        is not None
    )


def _same_name(one: str, other: str) -> bool:
    functions = [_FUNCTION.fullmatch(text) is not None for text in (one, other)]
    if any(functions):  # f(x), f and y all name a function
        return all(functions) or _NAME.fullmatch(other if functions[0] else one) is not None
    return _key(one) == _key(other)


# ---- single values ----

_UNITS = {
    name: unit
    for unit, names in {
        "cm": "cm centimeter centimeters centimetre centimetres",
        "mm": "mm millimeter millimeters",
        "m": "m meter meters metre metres",
        "km": "km kilometer kilometers kilometre kilometres",
        "inch": "in inch inches",
        "foot": "ft foot feet",
        "yard": "yd yard yards",
        "mile": "mi mile miles",
        "g": "g gram grams",
        "kg": "kg kilogram kilograms",
        "pound": "lb lbs pound pounds",
        "ounce": "oz ounce ounces",
        "second": "s sec secs second seconds",
        "minute": "min mins minute minutes",
        "hour": "h hr hrs hour hours",
        "day": "day days",
        "week": "week weeks",
        "month": "month months",
        "year": "yr yrs year years",
        "dollar": "dollar dollars usd",
        "cent": "cent cents",
        "liter": "l liter liters litre litres",
        "ml": "ml milliliter milliliters",
        "mph": "mph",
        "watt": "w watt watts",
        "kilowatt": "kw kilowatt kilowatts",
        "newton": "newton newtons",
        "joule": "joule joules",
        "ton": "ton tons tonne tonnes",
        "quart": "qt quart quarts",
        "gallon": "gal gallon gallons",
        "pint": "pint pints",
        "cup": "cup cups",
        "tablespoon": "tbsp tablespoon tablespoons",
        "teaspoon": "tsp teaspoon teaspoons",
        "acre": "acre acres",
        "penny": "penny pennies",
        "nickel": "nickel nickels",
        "dime": "dime dimes",
        "euro": "euro euros eur",
        "am": "am a.m a.m.",
        "pm": "pm p.m p.m.",
        "degree": "degree degrees deg",
        "radian": "rad radian radians",
    }.items()
    for name in names.split()
}
# A value and what follows it: `15\text{ cm}^2`, `5 m`, `3 \text{ apples}`.
_UNIT = re.compile(
    r"(?P<value>.*(?:[\d})!]|\\[A-Za-z]+|(?<![A-Za-z])[a-z]))\s*"
    r"(?P<unit>(?:\\text\{(?P<text>[^\d{}]*)\}|(?P<plain>(?<=[\d})! ])[A-Za-z][A-Za-z./' \-]+))"
    r"(?:\^\{?(?P<power>\d)\}?|(?P<bare>[23]))?(?:\\text\{(?P<per>[^\d{}]*)\}|(?P<plain_per>/[a-z]+))?)",
    re.S,
)
_TO_TEN = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_PREFIX = re.compile(r"(sq\.?|square|cubic|cu\.?)\s+")
_NEVER_VARIABLES = ("cm", "mm", "km", "kg", "ft", "am", "pm")  # two letters that nobody multiplies
_NUMBER_WORDS = {
    name: Fraction(value)
    for value, name in enumerate(
        ("zero", "one", *_TO_TEN, "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen"),
    )
}
_DIGITS_ONLY = re.compile(r"[-+*/(){}\[\]\d., ]*")
_BASED = re.compile(
    r"\(?([0-9A-F,]+)\)?_\{?\(?(\d+|\\text\{(?:two|three|four|five|six|seven|eight|nine|ten|twelve|sixteen)\})\)?\}?",
    re.I,
)
_BASES = {name: base for base, name in enumerate(_TO_TEN, start=2)} | {"twelve": 12, "sixteen": 16}
_RATIO = re.compile(r"\d{1,50}(?:\.\d{1,50})?(?::\d{1,50}(?:\.\d{1,50})?)+")
_CHOICE = re.compile(r"\(?([A-Za-z])\)?")
_CHOSEN = re.compile(r"\(([A-H])\)[ :]*(?=[\w$\\])(?!.*\([A-H]\))")


@dataclasses.dataclass(frozen=True)
class _Quantity:
    """A value without its unit. `unit` is comparable text such as `cm^2` or `mile/hour`; empty if it is not known."""

    value: str
    unit: str = ""
    percent: bool = False


def _quantity(text: str) -> _Quantity:
    """Takes the unit and the percent sign off a value; `3 million` becomes 3000000."""
    unit = ""
    match = _UNIT.fullmatch(text)
    if match:
        written = match["plain"] is None  # in \text{}
        name = (match["text"] if written else match["plain"]).strip()
        value = match["value"].strip()
        if scale := SCALE.match(name):
            value, name = _scaled(value, SCALES[scale[1].lower()]), name[scale.end() :].strip()
            if value and not name:
                return _Quantity(value)
        per = (match["per"] or match["plain_per"] or "").strip()
        power = match["power"] or match["bare"]
        if match["bare"] and name.lower() not in _UNITS:  # 2 times 3
            value = ""
        if (
            value
            and _is_unit(name, value, written)
            and not NO_UNIT.search(f"{name} {per}")
            and not has_words(value)
        ):
            text, unit = value, _unit(name + ("" if power is None else f"^{power}") + per)
    percent = text.endswith("%")
    return _Quantity(text.rstrip("%").rstrip() if percent else text, unit, percent)


def _scaled(value: str, scale: int) -> str:
    """`value` times `scale` as text; empty if it is no number."""
    number = _rational(value)
    if number is None:
        return ""
    number *= scale
    return str(number) if number.denominator == 1 else rf"\frac{{{number.numerator}}}{{{number.denominator}}}"


def _is_unit(name: str, value: str, written: bool) -> bool:
    r"""Whether a name after a value is a unit or a noun, rather than a product of variables or a function.

    Args:
        name: `cm`, `apples`, `miles per hour`.
        value: What stands before it.
        written: It stands in `\text{}`, where nobody writes variables.
    """
    words = re.findall(r"[A-Za-z]+", name)
    if not words or value == "a":  # a parabola
        return False
    if written:
        return name.lower() in _UNITS or words[0].lower() in (*_UNITS, "sq", "cu") or len(words[0]) > 2
    short = [word for word in words if len(word) < 3]
    if not short:
        return words[0].lower() in _UNITS or has_words(name)
    # 5 m and 2\pi cm^2 are lengths and areas, 2\pi hr and 3mn are products
    if len(words) == 1:
        unit = words[0].lower()
        return unit in _UNITS and (_rational(value) is not None or unit in _NEVER_VARIABLES)
    return all(
        word.lower() in _UNITS or word in ("per", "of", "sq", "cu", "o") or len(word) > 2 for word in words
    ) and ("/" in name or " per " in name or words[0] in ("sq", "cu") or has_words(name))


def _unit(name: str) -> str:
    """`square cm`, `cm^2` -> `cm^2`; `km/h`, `kilometers per hour`, `kph` -> `km/hour`; empty if a part is unknown."""
    name = re.sub(r"(?i)\bmph\b", "mile/h", re.sub(r"(?i)\bkm?ph\b", "km/h", name.lower()))
    parts = []
    for part in re.split(r"/|(?<![a-z])per(?![a-z])", name):
        prefix = _PREFIX.match(part.strip())
        rest = part.strip()[prefix.end() :] if prefix else part.strip()
        base, _, power = rest.partition("^")
        unit = _UNITS.get(base.strip())
        if unit is None:
            return ""
        exponent = power.strip("{} ") or ("1" if not prefix else "2" if prefix[1].startswith("s") else "3")
        parts.append(unit if exponent == "1" else f"{unit}^{exponent}")
    return "/".join(parts)


def has_words(text: str) -> bool:
    r"""Whether an answer is text: it holds `\text{...}` or a word, rather than a product such as `abc`."""
    if "\\text{" in text:
        return True
    for word in re.findall(r"[A-Za-z]{3,}", re.sub(r"\\[A-Za-z]+", " ", text)):
        product = set("abcd").issuperset(word) or not set("aeiou").intersection(word)
        if word.isupper() or not product:
            return True
    return re.fullmatch(r"[A-Z]{2,}", text) is not None  # IV, HT


def _equal_values(gold: str, response: str, symbolic: Symbolic) -> bool:
    if _key(gold) == _key(response):
        return True
    one, other = _quantity(gold), _quantity(response)
    if one.unit and other.unit and one.unit != other.unit:
        return False
    if other.percent and not one.percent:
        if _hundredth(one.value, other.value):
            return True
        value = _rational(one.value)
        if value is not None and 0 < abs(value) < 1:  # 0.5% is not one half
            return False
    return _equal_numbers(one.value, other.value, symbolic)


def _hundredth(gold: str, percentage: str) -> bool:
    """50% answers 1/2. It does not answer 50 hundredths of an integer: 2800% is no way to write 28."""
    try:
        value = evaluate(gold)
        return value.denominator != 1 and value == evaluate(percentage) / 100
    except NotRationalError:
        return False


def _equal_numbers(gold: str, response: str, symbolic: Symbolic) -> bool:
    if _key(gold) == _key(response):
        return True
    if not response:
        raise UnparsableError("nothing but a unit")
    gold_value, response_value = _rational(gold), _rational(response)
    if gold_value is not None and response_value is not None:
        return gold_value == response_value
    for value, text in ((gold_value, response), (response_value, gold)):
        if value is not None and (named := _NUMBER_WORDS.get(_text(text))) is not None:
            return value == named
    special = _equal_notations(gold, response, gold_value, response_value)
    if special is not None:
        return special
    if has_words(gold) or has_words(response) or (_CHOICE.fullmatch(gold) and _CHOICE.fullmatch(response)):
        return _text(gold) == _text(response)
    if _DIGITS_ONLY.fullmatch(response) and response_value is None:
        raise UnparsableError(f"no number: {response[:40]}")
    return _ask(symbolic, "value", gold, response)


def _rational(text: str) -> Fraction | None:
    try:
        return evaluate(text)
    except NotRationalError:
        return None


def _equal_notations(
    gold: str, response: str, gold_value: Fraction | None, response_value: Fraction | None
) -> bool | None:
    """Number bases, ratios and times; None if it is none of them."""
    based = _based(gold), _based(response)
    if based[0] and based[1]:
        return based[0] == based[1]
    if one_based := based[0] or based[1]:
        return one_based[0] == (response if based[0] else gold).replace(",", "").upper()
    ratios = _RATIO.fullmatch(gold), _RATIO.fullmatch(response)
    if all(ratios):
        one_parts, other_parts = ([Fraction(part) for part in text.split(":")] for text in (gold, response))
        return one_parts == other_parts
    if any(ratios):
        parts = [Fraction(part) for part in (gold if ratios[0] else response).split(":")]
        fraction = response_value if ratios[0] else gold_value
        written = response if ratios[0] else gold
        return (
            len(parts) == 2
            and parts[1] != 0
            and "/" in written.replace("\\frac", "/")
            and parts[0] / parts[1] == fraction
        )
    return None


def _based(text: str) -> tuple[str, int] | None:
    """The digits and the base of `52_8`."""
    match = _BASED.fullmatch(text)
    if match is None or (match[1].isalpha() and len(match[1]) == 1):  # a_1 is a variable
        return None
    base = _BASES[match[2][6:-1].lower()] if match[2].startswith("\\") else int(match[2][:9])
    return match[1].replace(",", "").upper(), base


def _only_number(text: str) -> Fraction | None:
    """The value of a sentence with exactly one number, such as "Janet has 18 apples left"."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    numbers = re.findall(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?![\w^/*+=])", text)
    rest = text.replace(numbers[0], " ", 1) if len(numbers) == 1 else text
    if len(numbers) != 1 or changes_its_number(text) or not re.fullmatch(r"[A-Za-z \-'.,%:()]*", rest):
        return None
    return _rational(numbers[0].rstrip(","))


def _text(text: str) -> str:
    """Words compare without case, punctuation, spaces and `\text`; single letters keep their case."""
    plain = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    plain = re.sub(r"^(?i:the|an?|option|choice) (?=.)", "", plain.strip())
    if choice := _CHOICE.fullmatch(plain):
        return choice.group(1).upper() if plain.startswith("(") else choice.group(1)
    if choice := _CHOSEN.match(plain):  # (B) 12
        return choice.group(1)
    return re.sub(r"[\s()\"'.,\-]", "", plain).casefold()


def _ask(symbolic: Symbolic, kind: str, gold: str, response: str) -> bool:
    for text in (gold, response):
        if len(text) > MAX_SYMBOLIC or not _balanced(text) or re.search(r"\d \d|\d'|[%&#@?\"]|\ufffd", text):
            if text is response:
                raise UnparsableError(f"no expression: {response[:40]}")
            return False
    gold, response = (_IN_NUMBER.sub("", text).replace(";", ",") for text in (gold, response))
    return symbolic(kind, gold, response)


def _nesting(text: str) -> int:
    """How deep brackets are nested; 0 if there are too few to go beyond MAX_NESTING."""
    if text.count("(") + text.count("[") + text.count("{") <= MAX_NESTING:
        return 0
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest


def _balanced(text: str) -> bool:
    depth = 0
    for character in re.sub(r"\\[{}]", "", text):
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return False
    return depth == 0
