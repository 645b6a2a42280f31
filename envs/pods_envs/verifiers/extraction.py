"""Finding the one final answer in a response; never the whole text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from pods_envs.verifiers.latex import closing_brace, closing_braces
from pods_envs.verifiers.words import changes_its_number, taken_back

FORMATS = ("auto", "boxed", "hash", "xml")


class Extraction(NamedTuple):
    """An answer and where it stood.

    Attributes:
        text: The answer as written; None if the response gives none.
        found: `boxed`, `hash` or `xml` (strict); `phrase` or `last_number` (flexible, `auto` only); "" for
            none.
        format_ok: Whether it stood where the answer format wants it (for `auto`: in any of the strict
            places).
    """

    text: str | None
    found: str = ""
    format_ok: bool = False


class _Place(NamedTuple):
    """The last answer of one kind, text[start:end], and its content `answer`; None if it is not finished."""

    start: int
    end: int
    answer: str | None


NOTHING = Extraction(None)


def extract(response: str, answer_format: str = "auto", *, last_number: bool = False) -> Extraction:
    r"""Finds the final answer.

    Args:
        response: All of the model's text. Reasoning (`<think>...</think>`) is not looked at, but for its last
            words where nothing follows it: see `_last_words`.
        answer_format: `boxed`, `hash` (`#### 42`) and `xml` (`<answer>42</answer>`) are strict: only that
            place is looked at, and the last one counts. `auto`: whichever of the three comes last; if there
            is none, "the answer is ..." or "Answer: ...".
        last_number: With `auto`, at last: the single number in a finished last sentence.

    Raises:
        ValueError: An unknown answer format.
    """
    if answer_format not in FORMATS:
        raise ValueError(f"answer_format={answer_format!r} is not one of {', '.join(FORMATS)}")
    places = _PLACES[answer_format]
    reasoning, visible = _split_reasoning(response)
    if visible is None:
        return _last_words(reasoning, places)
    found, place = _last_place(visible, places)
    if place is not None:
        if place.start and _NOT.search(visible, max(0, place.start - 20), place.start):
            return NOTHING
        if place.answer and place.end < len(visible) and taken_back(place.answer, visible[place.end :]):
            return NOTHING
        text = _innermost(found, place.answer)
        return Extraction(text, found, True) if text else NOTHING
    if answer_format != "auto":
        return NOTHING
    text = _phrase(visible)
    if text and last_number and not re.search(r"\d", text):
        text = None  # "Answer: First, she ..." starts a solution
    if text is not None:
        return Extraction(text, "phrase") if text.strip() else NOTHING
    text = _last_number(visible) if last_number else None
    return NOTHING if text is None else Extraction(text, "last_number")


def _split_reasoning(response: str) -> tuple[str, str | None]:
    """(reasoning, what follows it); the latter None if the reasoning never ends or nothing follows."""
    if "think>" not in response:
        return "", response
    end = len(response)
    while response.endswith("</think>", 0, end) or response[end - 1 : end].isspace():
        end -= 1 if response[end - 1].isspace() else len("</think>")
    text = response[:end]
    closed = text.rfind("</think>")
    if closed < 0 and "</think>" not in response and "<think>" not in text:
        return "", response
    visible = "" if closed < 0 else text[closed + len("</think>") :]
    if closed < 0 or not visible.strip() or "<think>" in visible:
        return text, None
    return text[:closed], visible


def _last_words(reasoning: str, places: tuple[_Finder, ...]) -> Extraction:
    """A response that is all reasoning gives an answer only if it ends in one, in a strict place."""
    found, place = _last_place(reasoning, places)
    if place is None or re.search(r"[^\s.$*\\)\]]", reasoning[place.end :]):
        return NOTHING
    text = _innermost(found, place.answer)
    return Extraction(text, found) if text else NOTHING


def _last_place(text: str, places: tuple[_Finder, ...]) -> tuple[str, _Place | None]:
    found, last = "", None
    for name, mark, find in places:
        if mark in text and (place := find(text)) and (last is None or place.end > last.end):
            found, last = name, place
    return found, last


def _innermost(found: str, answer: str | None) -> str | None:
    """The answer within an answer: `<answer>...</answer>` may hold a box, a `####`, or lines of working."""
    if answer is None:
        return None
    if box := last_box(answer):
        return box.answer or None
    if found == "xml":
        if "####" in answer:
            answer = answer.rsplit("####", 1)[1]
        if "\\begin" not in answer and "\\[" not in answer:
            answer = answer.strip().rsplit("\n", 1)[-1]
    return answer.strip() or None


_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*|(?<![a-zA-Z\\])boxed(?=\{)")
_GAP = r"(?:[\s$(]|\\q?quad|\\[,; ()]){0,9}"
_JOINED = re.compile(rf"{_GAP}(?:,|or else|or|and|\\text\{{ ?(?:or|and) ?\}}){_GAP}")
_NOT = re.compile(r"(?i)\bnot[ \t]+(?:\$|\\\()?[ \t]*$")
_BARE = re.compile(r"-?[\w.,/]{0,100}\w|\\\w+")


def last_box(text: str) -> _Place | None:
    r"""The last `\boxed{...}`, `\fbox{...}` or `\boxed 42`. Of boxes within a box only the braces stay."""
    if "box" not in text:
        return None
    braces: dict[int, int] | None = None
    last: _Place | None = None
    for box in _BOX.finditer(text):
        if last is not None and box.start() < last.end:
            continue
        start, end = box.span()
        if text.startswith("{", end):
            if last is not None and braces is None:  # there may be thousands
                braces = closing_braces(text)
            closed = closing_brace(text, end) if braces is None else braces.get(end)
            if closed is None:
                last = _Place(start, end, None)
                continue
            answer = text[end + 1 : closed]
            answer = (_BOX.sub("", answer) if "box" in answer else answer).strip()
            joined = last and last.answer and answer and _JOINED.fullmatch(text, last.end, start)
            if last and joined and answer != last.answer:
                start, answer = last.start, f"{last.answer}; {answer}"  # \boxed{1} or \boxed{2}
            last = _Place(start, closed + 1, answer)
        else:
            bare = _BARE.match(text, end)
            last = _Place(start, bare.end() if bare else end, bare.group() if bare else "")
        if text.find("box", last.end) < 0:
            break
    return last


_HASH = re.compile(r"####+[ \t]*((?:(?!</)[^\n])*)")
_NEXT_LINE = re.compile(r"\s*((?:(?!</)[^\n])*)")
_HEADING = re.compile(
    r"\s*\**(?:(?:step|explanation|note|reasoning|check|verification|proof)\b|\d{1,2}[.):]\s+\**[A-Za-z])",
    re.I,
)
_TEXT = re.compile(r"\S")


def _last_hash(text: str) -> _Place | None:
    """The rest of the line after the last `####`, or the next line with text if that is empty.

    Markdown headings look alike: `#### Step 1`, `#### 2. Add`, and a line without a digit that more text
    follows.
    """
    last: _Place | None = None
    for match in _HASH.finditer(text):
        field = match if match.group(1).strip() else _NEXT_LINE.match(text, match.end())
        assert field is not None
        answer = field.group(1)
        if _HEADING.match(answer) or (not re.search(r"\d", answer) and _TEXT.search(text, field.end())):
            continue
        last = _Place(match.start(), field.end(), answer.rstrip(" \t#"))
    return last


_OPEN_TAG = re.compile(r"<answer>", re.I)
_CLOSE_TAG = re.compile(r"</answer>", re.I)


def _last_tag(text: str) -> _Place | None:
    """The last `<answer>...</answer>`."""
    starts = list(_OPEN_TAG.finditer(text))
    if not starts:
        return None
    start = starts[-1]
    end = _CLOSE_TAG.search(text, start.end())
    if end is None:
        return _Place(start.start(), start.end(), None)
    return _Place(start.start(), end.end(), text[start.end() : end.start()])


_Finder = tuple[
    str, str, Callable[[str], _Place | None]
]  # name, what a text must hold, where the last one is
_STRICT: tuple[_Finder, ...] = (
    ("boxed", "box", last_box),
    ("hash", "####", _last_hash),
    ("xml", "<", _last_tag),
)
_PLACES = {"auto": _STRICT, **{finder[0]: (finder,) for finder in _STRICT}}


_ANSWER = re.compile(r"(?i)(?<![a-z])ans")
# From that word on.
_PHRASE = re.compile(
    r"(?i)(?:answers?|ans)(?![A-Za-z])(?:\s(?:to|for)\s[^.\n=:]{1,60}?)?[\s*_}]{0,20}"
    r"(?:(?:is|was|are|equals|(?:should|would|must|will) be|=|:|→)[\s*_:]{0,20})+"
)
_HEADING_ANSWER = re.compile(r"(?i)answer(?:\s\(?final\)?)?[*_ \t]{0,20}\n")
_BEFORE_HEADING = re.compile(r"(?im)^[#*_ \t]{0,20}(?:(?:the|my)\s)?(?:(?:final|correct|short)\s)?\Z")
_IN_TEXT = re.compile(r"\\(?:text\w{0,2}|math(?:rm|bf|it)|mbox)\s?\{[^{}]{0,40}$")
_FORMULA_END = re.compile(r"\\[\])]|(?<!\\)\$\$?")
_BULLET = re.compile(r"\s*\n\s*[->•]\s+")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<!\$)\$(?!\s*\$)([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.S)
_MORE = r"(?:(?:or|and)\s+(?:also\s+|maybe\s+|possibly\s+)?[\d$\\(+-]|[A-Za-z]\s*=)"  # another value
_SENTENCE_END = re.compile(
    rf"[.!?](?=[\s*_\"')]|$)|;(?!\s*(?:or\s|and\s)?[\d$\\(-])|\n|,(?=\s+(?!{_MORE})[A-Za-z])"
    r"|\s\((?=(?!or\b)[A-Za-z])|\s(?:because|since|as|so)\s"
)
# After what was taken for all of the answer.
_OTHERS = re.compile(r"(?i)[\s.?!,;)*_]*\(?(?:or|and also|as well as|no,? wait)\b")
_OPEN_SUM = re.compile(r"\d\s*(?:[-+*/^×÷]|\\times|\\cdot|\\div)")
_FIELD = 2000  # characters after a phrase that may be part of the answer


def _phrase(text: str) -> str | None:
    """What follows the last "the answer is" or "Answer:" in its sentence, or the last heading "Answer".

    Returns:
        None if neither comes, "" if what comes is no answer.
    """
    for word in reversed(list(_ANSWER.finditer(text))):
        start = word.start()
        match = _PHRASE.match(text, start)
        if match is not None:
            break
        heading = _HEADING_ANSWER.match(text, start)
        if heading is not None and _BEFORE_HEADING.search(text, max(0, start - 40), start):
            return _under_heading(text[heading.end() - 1 : heading.end() + _FIELD])
    else:
        return None
    start = match.end()
    if bullet := _BULLET.search(text, match.start(), start + 4):
        start = max(start, bullet.end())
    field = text[start : start + _FIELD].lstrip(" \n\t*_")
    if _IN_TEXT.search(text, max(0, match.start() - 60), match.start()):  # \[ \text{Answer: } 36 \]
        close = field.find("}")
        if close >= 0 and "{" not in field[:close]:
            field = (field[:close] + " " + field[close + 1 :]).lstrip()
        end = _FORMULA_END.search(field)
        if end and not _FORMULA.match(field):
            if field[: end.start()].strip():
                return _denied(field[: end.start()], field[end.end() :])
            field = field[end.end() :].lstrip()
    formula = _FORMULA.match(field)
    if formula and not re.match(r"\s*(?:or|and|,|/|;)\s*[\d$\\]", field[formula.end() :]):
        return _denied(next(group for group in formula.groups() if group is not None), field[formula.end() :])
    end = _SENTENCE_END.search(field)
    answer = (field[: end.start()] if end else field).rstrip(" *_")
    if end is None and _is_open(answer):
        return ""
    return _denied(answer, field[end.start() :] if end else "")


def _under_heading(body: str) -> str:
    """The one line or formula under a heading; more than that is a solution."""
    body = _BULLET.sub(" ", body, count=1).strip(" *_\n\t")
    formula = _FORMULA.fullmatch(body)
    if formula:
        return next(group for group in formula.groups() if group is not None)
    if "\n" in body or re.search(r"[.!?]\s", body) or _is_open(body):
        return ""
    return body


def _denied(answer: str, rest: str) -> str:
    """The answer, unless what follows adds another or takes it back."""
    return "" if _OTHERS.match(rest) or taken_back(answer, rest) else answer


def _is_open(answer: str) -> bool:
    """Whether a text that just ends may have been cut off in the middle of a sum: `27+9`, but not `27+9=36`."""
    last = answer.rsplit("=", 1)[-1]
    return bool(_OPEN_SUM.search(last)) and not re.search(r"(?<![A-Za-z\\])[A-Za-z]", last)


_NUMBER = re.compile(
    r"(?<![\w/^.])-?[$€£]?-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\d^/*+])(?!,\d{3}(?!\d))"
    r"(?!(?:[kKMBx]|e\d+|st|nd|rd|th)(?![A-Za-z]))%?"
)
# A sentence that is a step, not the end.
_STEP = re.compile(r"(?i)(?:let|suppose|assume|first|next|then we|now we)\b")
_EQUATION = re.compile(  # 2x = 18 does not say what x is
    r"(?:\d\s*\*?\s*[A-Za-z]|(?<![A-Za-z])[A-Za-z]\s*[-+*/]\s*[\d.]+)\s*=[^=]*$"
)
_NOT_ALL = re.compile(r"[+*/×]|[-–—]\s+[$€£]?\d|–\d")  # 18 + x, or a dash that may be a minus


def _last_number(text: str) -> str | None:
    """The number of a finished last sentence, if it is the only one there or after the last equals sign."""
    text = text.strip(" \n\t*_\"'").replace("**", "").replace("−", "-")
    if _NUMBER.fullmatch(text[-100:]):
        return text  # nothing but a number
    if not text.endswith((".", "!")):
        return None
    sentence = re.split(r"(?<=[.!?])\s|\n", text[:-1][-1000:])[-1]
    if _STEP.match(sentence) or _EQUATION.search(sentence):
        return None
    last = sentence.rsplit("=", 1)[-1]
    numbers = _NUMBER.findall(last)
    if len(numbers) != 1 or _NOT_ALL.search(last) or changes_its_number(last):
        return None
    return str(numbers[0])
