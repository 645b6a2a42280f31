"""Finding the one final answer in a response; never the whole text."""

from __future__ import annotations

import dataclasses
import re

FORMATS = ("auto", "boxed", "hash", "xml")


@dataclasses.dataclass(frozen=True)
class Extraction:
    """An answer and where it stood.

    Attributes:
        text: The answer as written; None if the response gives none.
        found: `boxed`, `hash` or `xml` (strict); `phrase` or `last_number` (flexible, `auto` only); "" for none.
        format_ok: Whether it stood where the answer format wants it (for `auto`: in any of the strict places).
    """

    text: str | None
    found: str = ""
    format_ok: bool = False


NOTHING = Extraction(None)


def extract(response: str, answer_format: str = "auto", *, last_number: bool = False) -> Extraction:
    r"""Finds the final answer.

    Args:
        response: All of the model's text. What comes before the last `</think>` is not looked at; a `<think>` that
            is not closed means that there is no answer.
        answer_format: `boxed`, `hash` (`#### 42`) and `xml` (`<answer>42</answer>`) are strict: only that place is
            looked at, and the last one counts. `auto`: whichever of the three comes last; if there is none,
            "the answer is ..." or "Answer: ...".
        last_number: With `auto`, at last: the single number in a finished last sentence.

    Raises:
        ValueError: An unknown answer format.
    """
    if answer_format not in FORMATS:
        raise ValueError(f"answer_format={answer_format!r} is not one of {', '.join(FORMATS)}")
    visible = _after_thinking(response)
    if visible is None:
        return NOTHING
    finders = {"boxed": last_box, "hash": _last_hash, "xml": _last_tag}
    if answer_format != "auto":
        _, text = finders[answer_format](visible) or (0, None)
        if answer_format == "xml" and text is not None:
            text = _innermost(text)
        return Extraction(text, answer_format, True) if text and text.strip() else NOTHING
    places = [(*place, name) for name, finder in finders.items() if (place := finder(visible)) is not None]
    if places:
        _, text, found = max(places, key=lambda place: place[0])
        if text is not None:
            text = _innermost(text)
        return Extraction(text, found, True) if text and text.strip() else NOTHING
    text = _phrase(visible)
    if text is not None:
        return Extraction(text, "phrase") if text.strip() else NOTHING
    text = _last_number(visible) if last_number else None
    return NOTHING if text is None else Extraction(text, "last_number")


def _after_thinking(response: str) -> str | None:
    end = response.rfind("</think>")
    visible = response if end < 0 else response[end + len("</think>") :]
    return None if "<think>" in visible else visible


def _innermost(text: str) -> str | None:
    box = last_box(text)
    if box is not None:
        return box[1]
    return text.rsplit("####", 1)[1] if "####" in text else text


# Each finder returns (position, text) of the last place of its kind; text is None where that place is not finished.
_Place = tuple[int, str | None]

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.S)


def last_box(text: str) -> _Place | None:
    r"""The content of the last `\boxed{...}`, `\fbox{...}` or `\boxed 42`; of nested ones the innermost."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    ends = _closing_braces(text)
    last: _Place | None = None
    end = -1
    for box in boxes:
        if box.start() < end:
            continue  # within the box before it
        if text[box.end() : box.end() + 1] == "{":
            closed = ends.get(box.end())
            last = (box.start(), None if closed is None else text[box.end() + 1 : closed])
            end = len(text) if closed is None else closed
        else:
            bare = re.match(r"-?[\w.,/]*[\w]|\\\w+", text[box.end() :][:100])
            last = (box.start(), bare.group() if bare else "")
    assert last is not None
    position, content = last
    if content is not None and _BOX.search(content):
        content = _without_boxes(content)
    return position, content


def _closing_braces(text: str) -> dict[int, int]:
    ends = {}
    stack = []
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            stack.append(match.start())
        elif match.group() == "}" and stack:
            ends[stack.pop()] = match.start()
    return ends


def _without_boxes(content: str) -> str:
    """Boxes within a box: the command goes, its braces stay."""
    return _BOX.sub("", content)


_HASH = re.compile(r"####+[ \t]*([^\n]*)")


def _last_hash(text: str) -> _Place | None:
    """The rest of the line after the last `####`, or the next line with text if that is empty."""
    last: _Place | None = None
    for match in _HASH.finditer(text):
        field = match.group(1)
        if not field.strip():
            following = re.compile(r"\s*([^\n]*)").match(text, match.end())
            field = following.group(1) if following else ""
        if field.strip() and not re.search(r"\d", field) and last is not None:
            continue  # a markdown heading after the answer
        if re.match(r"\s*\**(?:step\b|\d{1,2}[.):]\s+\**[A-Za-z])", field, re.I):
            continue  # a markdown heading with a number
        last = (match.start(), field.rstrip().removesuffix("####"))
    return last


_OPEN = re.compile(r"<answer>", re.I)
_CLOSE = re.compile(r"</answer>", re.I)


def _last_tag(text: str) -> _Place | None:
    """The content of the last `<answer>...</answer>`."""
    starts = list(_OPEN.finditer(text))
    if not starts:
        return None
    end = _CLOSE.search(text, starts[-1].end())
    return starts[-1].start(), text[starts[-1].end() : end.start()] if end else None


_PHRASE = re.compile(r"(?i)\banswer\b[\s*_]{0,20}(?:(?:is|was|are|=|:)[\s*_:]{0,20})+")
_SENTENCE_END = re.compile(r"[.!?](?=[\s*_\"')]|$)|;|\n|,(?=\s+[A-Za-z])|\s\((?=[A-Za-z])|\s(?:because|since|as|so)\s")


def _phrase(text: str) -> str | None:
    """What follows the last "the answer is" or "Answer:", up to the end of the sentence; None if it never comes."""
    match = None
    for match in _PHRASE.finditer(text):
        pass
    if match is None:
        return None
    field = text[match.end() :][:2000].lstrip(" \n\t*_")
    formula = re.match(r"\$\$?([^$\n]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", field, re.S)
    if formula and not re.match(r"\s*(?:or|and|,)\s*[\d$\\]", field[formula.end() :]):
        return next(group for group in formula.groups() if group is not None)
    end = _SENTENCE_END.search(field)
    answer = (field[: end.start()] if end else field).rstrip(" *_")
    finished = end is not None or len(text) > match.end() + 2000
    if not finished and re.search(r"\d\s*(?:[-+*/^=×÷]|\\times|\\cdot|\\div)", answer):
        return ""  # cut off in the middle of a sum
    return answer


_NUMBER = re.compile(r"-?\$?-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\d^/*+])%?")


def _last_number(text: str) -> str | None:
    """The number that a finished last sentence gives, if it is the only one or follows its last equals sign."""
    text = text.rstrip(" \n\t*_\"'")
    if not text.endswith((".", "!")):
        return None
    sentence = re.split(r"(?<=[.!?])\s|\n", text[:-1][-1000:])[-1]
    numbers = _NUMBER.findall(sentence.rsplit("=", 1)[-1])
    hedged = re.search(r"(?i)\b(?:or|not|between|maybe|perhaps|either)\b", sentence)
    return numbers[0] if len(numbers) == 1 and not hedged else None


