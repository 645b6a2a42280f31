r"""An answer as people and models write it -> one plain form of LaTeX, and the splitting of that form.

The plain form has no `\left`, no spacing commands, `\frac{a}{b}` for every fraction, `\text{...}` for every
text command, ASCII digits and operators, and no white space except between two digits (`1 1/4`) or within
`\text{...}`.
"""

from __future__ import annotations

import functools
import re
import unicodedata

_UNICODE = str.maketrans(
    {
        **dict.fromkeys("−–—﹣－", "-"),
        **dict.fromkeys("×✕", r"\times "),
        **dict.fromkeys("·⋅∙", r"\cdot "),
        **dict.fromkeys("∕⁄", "/"),
        **dict.fromkeys("₹₽₩", "$"),
        **dict.fromkeys("“”„", '"'),
        **dict.fromkeys("‘’", "'"),
        "÷": r"\div ",
        "π": r"\pi ",
        "∞": r"\infty ",
        "±": r"\pm ",
        "≤": r"\le ",
        "⩽": r"\le ",
        "≥": r"\ge ",
        "⩾": r"\ge ",
        "≠": r"\neq ",
        "≈": r"\approx ",
        "∈": r"\in ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∅": r"\emptyset ",
        "ℝ": r"\mathbb{R}",
        "θ": r"\theta ",
        "α": r"\alpha ",
        "β": r"\beta ",
        "λ": r"\lambda ",
        "…": r"\ldots ",
        "°": r"^\circ ",
        "√": r"\sqrt ",
        "∛": r"\sqrt[3]",
        "％": r"\%",
        "﷼": "",
        "⟨": "(",
        "⟩": ")",
    }
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SPECIAL_TOKEN = re.compile(r"</?(?:s|eos|bos|pad|[|｜][\w ▁]{1,40}[|｜])>|<(?:start|end)_of_turn>")

_TEXT_COMMANDS = "text|mbox|hbox|textbf|textit|textrm|texttt|textsf|mathrm|mathbf|mathit|mathsf|rm|bf|it"
_NEWLINE = "\x1e"  # stands for `\\`, so that no rule takes its second half for the start of a command
_SPACED_NUMBER = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_END = r"(?![a-zA-Z])"  # of a command
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"  # braces, three deep
# (what a text must hold for the pattern to match, pattern, replacement): most texts hold few of the first, and a
# look for a fixed string costs next to nothing.
_RULES = tuple(
    (needle, re.compile(pattern), replacement)
    for needle, pattern, replacement in (
        ("\\\\", r"\\\\(?:\[[\w. ]*\])?", _NEWLINE),
        ("\\cr", rf"\\cr{_END}", _NEWLINE),
        ("<<", r"<<[^<>]*>>", ""),  # GSM8K's calculator
        ("**", r"\*\*", ""),
        ("`", r"`", ""),
        ("\\", r"\\(?:left|right)\s*\.", ""),
        (
            "\\",
            rf"\\(?:left|right|[bB]igg?[lrm]?|(?:display|text)style|(?:no)?limits|boldsymbol|ensuremath){_END}",
            "",
        ),
        ("\\", r"\\(?:phantom|hspace|vspace|label|tag|(?:text)?color)\*?\{[^{}]*\}", ""),
        ("\\", rf"\\(?:tiny|small|normalsize|[lL]arge|LARGE|[hH]uge|underline){_END}", ""),
        ("\\begin", r"\\begin\{(?:align(?:ed)?|gathered|split|equation)\*?\}", ""),
        ("\\end", r"\\end\{(?:align(?:ed)?|gathered|split|equation)\*?\}", ""),
        ("&=", "&=", "="),
        # thousands written in TeX: 10,\!000  10{,}000  10\,000
        ("\\", r"(?<=\d)(?:, ?\\! ?|\\[,;:] ?)(?=\d{3}(?!\d))", ""),
        ("{,}", r"(?<=\d)\{,\}(?=\d{3}(?!\d))", ""),
        (",0", r"(?<=\d),(?=0\d\d(?!\d))", ""),  # no list has the item 000
        (",", r"(?<=\d), ?(?:(?<= )|\\[,;:] ?)(?=-?\d)", ";"),  # 11, 050 is a list; 11,050 is a number
        ("\\!", r"\\!", ""),
        ("\\", rf"\\[,;: ]|\\(?:q?quad|enspace|thinspace){_END}|\\[()\[\]]", " "),
        ("~", "~", " "),
        ("$", r"(?<!\\)\$", " "),
        ("\\", rf"\\textdollar{_END}|\\\$", ""),
        ("", r"[€£¥¢]", ""),
        ("frac", rf"\\(?:[dtcs]|nice)frac{_END}", r"\\frac"),
        ("binom", rf"\\[dt]binom{_END}", r"\\binom"),
        ("binom", r"\\binom ?(\w) ?(\w)", r"\\binom{\1}{\2}"),
        ("\\le", rf"\\(?:leqslant|leqq|leq){_END}", r"\\le "),
        ("<=", "<=", r"\\le "),
        ("\\ge", rf"\\(?:geqslant|geqq|geq){_END}", r"\\ge "),
        (">=", ">=", r"\\ge "),
        ("\\lt", rf"\\lt{_END}", "<"),
        ("&lt;", "&lt;", "<"),
        ("\\gt", rf"\\gt{_END}", ">"),
        ("&gt;", "&gt;", ">"),
        ("\\ne", rf"\\ne{_END}", r"\\neq "),
        ("!=", "!=", r"\\neq "),
        ("dots", rf"\\(?:cdots|dots[cbmio]?){_END}", r"\\ldots "),
        ("...", r"\.\.\.+", r"\\ldots "),
        ("\\varnothing", rf"\\varnothing{_END}", r"\\emptyset "),
        ("\\lbrace", rf"\\lbrace{_END}", r"\\{"),
        ("\\rbrace", rf"\\rbrace{_END}", r"\\}"),
        ("\\langle", rf"\\langle{_END}", "("),
        ("\\rangle", rf"\\rangle{_END}", ")"),
        ("vert", rf"\\[lr]?vert{_END}", "|"),
        ("R", rf"\\(?:mathbb|Bbb|mathbf) ?\{{?R\}}?{_END}", r"\\mathbb{R}"),
        # an angle in a function: \sin 30^\circ
        (
            "\\circ",
            r"(\\(?:sin|cos|tan|cot|sec|csc)(?: ?\^ ?\{?\d\}?)? ?[({]? ?)"
            r"(\d+(?:\.\d+)?) ?\^ ?(?:\\circ|\{ ?\\circ ?\})",
            r"\1(\\frac{\2\\pi}{180})",
        ),
        ("\\circ", r"\^ ?(?:\{ ?\\circ ?\}|\\circ)(?: ?\\?(?:text|mathrm)? ?\{? ?[CF] ?\}?$)?", ""),
        ("\\degree", r"\^ ?(?:\{ ?\\degree ?\}|\\degree)|\\degree(?![a-zA-Z])", ""),
        ("\\", r"\\(?:mathrm|rm|text) ?\{ ?([eid]) ?\}|\\mathbf ?\{ ?([a-z]) ?\}", r" \1\2 "),
        ("\\operatorname", r"\\operatorname\*? ?\{ ?([a-zA-Z]+) ?\}", r"\\\1 "),
        ("\\", rf"\\(?:{_TEXT_COMMANDS}){_END}", r"\\text"),
        ("\\prime", r"\^ ?\{ ?\\prime ?\}", "'"),
        ("\\%", r"\\%", "%"),
        ("", r"(?i:\bper ?cent\b)|\\text ?\{ ?per ?cent ?\}", "%"),
        ("\\infty", rf"\+ ?\\infty{_END}", r"\\infty"),
        ("\\text", r"\\text ?\{([^{}^]*)\^ ?\{?(\d)\}?\}", r"\\text{\1}^\2"),
        ("\\text", r"\\text ?\{ ?([^{}]*?) ?\}", r"\\text{\1}"),
        ("}_", r"\\text\{(\w+)\}_", r"\1_"),
        ("\\text{to}", r"(?<=\d) ?\\text\{to\} ?(?=\d)", ":"),
        # repeating decimals: 0.\bar3  0.333\ldots
        (".", r"(?<=\.)(\d*)\\(?:bar|dot) ?\{?(\d+)\}?", r"\1\\overline{\2}"),
        ("\\ldots", r"(?<=\.)(\d*?)(\d{1,3})\2{2,} ?\\ldots", r"\1\\overline{\2}"),
        # as in plain text
        ("sqrt", r"(?<![A-Za-z\\])sqrt(?![A-Za-z])", r"\\sqrt"),
        ("", r"(?<![A-Za-z\\])(sin|cos|tan|ln|log|exp)(?![A-Za-z])", r"\\\1 "),
        ("pi", r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        ("infinity", r"(?:\\text\{)?(?<![A-Za-z\\])infinity(?![A-Za-z])(?:\})?", r"\\infty "),
        ("10^", r"(?<=\d) ?x ?(?=10\^)", r"\\times "),
        (
            "\\over",
            rf"\{{((?:[^{{}}]|{_GROUP})*)\\over(?![a-zA-Z])((?:[^{{}}]|{_GROUP})*)\}}",
            r"\\frac{\1}{\2}",
        ),
        # every argument gets its braces: \frac12  \frac1{2}  \sqrt2  \sqrt[3]2
        ("\\frac", r"\\frac ?(\d|[A-Za-z]|\\[A-Za-z]+)", r"\\frac{\1}"),
        ("\\frac", rf"\\frac ?({_GROUP}) ?(\d|[A-Za-z]|\\[A-Za-z]+)", r"\\frac\1{\2}"),
        (
            "\\sqrt",
            r"\\sqrt ?(\[[^\[\]]*\])? ?(\d+|[A-Za-z]|\\[A-Za-z]+)",
            r"\\sqrt\1{\2}",
        ),
        ("\\sqrt", r"\\sqrt ?\(((?:[^()]|\([^()]*\))*)\)", r"\\sqrt{\1}"),
        (" ", r"([_^])(\w) (?=\w)", r"\1{\2}"),
        ("\\", r"(\\[A-Za-z]+) +(?=\d)", r"\1"),
    )
)


def clean(text: str) -> str:
    """The plain form of an answer (see the module docstring)."""
    if text.isdecimal() and text.isascii():
        return text
    text = plain_characters(text)
    if not text.isascii():
        text = re.sub(
            "[²³¹⁰⁴-⁹⁺⁻ⁿ]+", lambda match: "^{" + match.group().translate(_SUPERSCRIPTS) + "}", text
        )
        text = re.sub("[₀-₉]+", lambda match: "_{" + match.group().translate(_SUBSCRIPTS) + "}", text)
        text = re.sub(r"(?<=\d)(?=[½⅓⅔¼¾⅕⅛⅜⅝⅞])", " ", text)
        text = unicodedata.normalize("NFKC", text.translate(_UNICODE)).translate(_UNICODE)
    text = " ".join(text.split())
    for needle, pattern, replacement in _RULES:
        if needle in text:
            text = pattern.sub(replacement, text)
    text = strip(_tight(text).replace(_NEWLINE, r"\\"))
    if text.startswith("=") or text.endswith("\\"):
        text = strip(re.sub(r"^=+|(?<!\\)\\$", "", text))
    return text.replace(" ", "") if _SPACED_NUMBER.fullmatch(text) else text


def strip(text: str) -> str:
    """Without the full stop, quotes, braces and empty lines around an answer."""
    previous = None
    while previous != text:
        previous = text
        text = text.strip()
        if text.endswith((".", ",", ";", ":", "\\")):
            text = re.sub(r"(?:(?<!\\)[.,;:]|\\\\)+$", "", text)
        if len(text) > 2 and text[0] in "\"'*" and text[-1] == text[0]:
            text = text[1:-1]
        if text.startswith("{"):
            ends = closing_braces(text)
            layers = 0
            while layers in ends and ends[layers] == len(text) - 1 - layers:
                layers += 1
            text = text[layers : len(text) - layers]
    return text


_BRACE = re.compile(r"\\[\\{}]|[{}]")


def closing_braces(text: str) -> dict[int, int]:
    r"""Where the brace that opens at a position is closed. `\{` and `\}` do not count."""
    ends = {}
    stack = []
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            stack.append(match.start())
        elif match.group() == "}" and stack:
            ends[stack.pop()] = match.start()
    return ends


def closing_brace(text: str, start: int) -> int | None:
    r"""Where the brace that opens at `start` is closed; `closing_braces(text)[start]` in less time."""
    if "\\{" in text or "\\}" in text or "\\\\" in text:
        depth = 0
        for match in _BRACE.finditer(text, start):
            depth += (match.group() == "{") - (match.group() == "}")
            if depth == 0 and match.group() == "}":
                return match.start()
        return None
    depth, end = 0, start
    while True:
        previous, end = end, text.find("}", end + 1)
        if end < 0:
            return None
        depth += text.count("{", previous, end) - 1
        if depth == 0:
            return end


def plain_characters(text: str) -> str:
    """Without control, format (zero-width) and special-token characters; lone surrogates become U+FFFD."""
    text = _SPECIAL_TOKEN.sub(" ", text)
    if text.isascii() and text.isprintable():
        return text
    kept = []
    for character in text:
        category = unicodedata.category(character)
        if category == "Cs":
            kept.append("\ufffd")
        elif category == "Zs" or character in "\n\t\r":
            kept.append(" ")
        elif category not in ("Cc", "Cf"):
            kept.append(character)
    return "".join(kept)


def _tight(text: str) -> str:
    r"""Drops white space, but not in `\text{...}`, between two digits, or where a word would run on."""
    if " " not in text:
        return text
    parts = re.split(r"(\\text\{[^{}]*\})", text)
    for index, part in enumerate(parts):
        if index % 2 == 0:
            part = re.sub(r" +(?![A-Za-z\d ])|(?<![A-Za-z\d ]) +| +(?= )", "", part)
            parts[index] = re.sub(r"(?<=\d) (?=[A-Za-z](?![A-Za-z]))", "", part)
        else:
            parts[index] = " ".join(part.split())
    return "".join(parts)


def closing(text: str, start: int) -> int:
    r"""Index of the bracket that closes the one at `start`; -1 if none does. Any kind closes any: `[2,5)`."""
    depth = 0
    for match in re.compile(r"\\[^{}]|\\?[()\[\]{}]").finditer(text, start):
        token = match.group()[-1]
        if token in "([{":
            depth += 1
        elif token in ")]}":
            depth -= 1
            if depth == 0:
                return match.end() - 1
    return -1


@functools.cache
def _splitter(separators: str) -> re.Pattern[str]:
    return re.compile(
        rf"(?P<separator>{separators})|(?P<text>\\text\{{[^{{}}]*\}})|\\begin|\\end|(?P<bracket>\\?[()\[\]{{}}])|\\.",
        re.S,
    )


def split(text: str, separators: str) -> list[tuple[str, str]]:
    r"""Splits outside of all brackets at matches of the pattern `separators`.

    Returns:
        (separator before, part) pairs; the first separator is empty.
    """
    if not re.search(separators, text):
        return [("", text)]
    pattern = _splitter(separators)
    parts = []
    depth = start = 0
    before = ""
    for match in pattern.finditer(text):
        if match.group("separator") is not None:
            if depth == 0:
                parts.append((before, text[start : match.start()]))
                before, start = match.group("separator"), match.end()
        elif match.group("bracket"):
            depth += 1 if match.group()[-1] in "([{" else -1
        elif match.group() in ("\\begin", "\\end"):
            depth += 1 if match.group() == "\\begin" else -1
    parts.append((before, text[start:]))
    return parts
