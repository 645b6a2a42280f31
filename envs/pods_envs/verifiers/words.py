"""Words around a number that change what is said: hedges, denials, bounds, and multiples of the number."""

from __future__ import annotations

import re

# With one of these a text gives no number, or more than one.
_DOUBT = re.compile(
    r"(?i)(?<![a-z])(?:nor|not|never|none|neither|cannot|maybe|perhaps|or so|possibly|probably|except|wrong"
    r"|incorrect|approx|approximately|roughly|(?:could|might|may)(?: also)? be)(?![a-z])|n't(?![a-z])"
)
# Before a number.
_BOUND = re.compile(
    r"(?i)(?<![a-z])(?:at (?:least|most)|(?:more|less|fewer|greater|larger|smaller|higher|lower|other) than"
    r"|or|either|between|up to|under|over|above|below|within|exceeds?|about|around|approximately|roughly|nearly"
    r"|almost|close to|negative|minus|plus|double|twice|triple|base|root of|to the power of"
    r"|(?:half|thirds?|quarters?|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths?|one|multiples?|squares?|cubes?)"
    r" of(?: the)?|january|february|march|april|may|june|july|august|september|october|november|december)\s+[$€£]?\d"
    r"|~\s*\d"
)
SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
SCALE = re.compile(rf"(?i)({'|'.join(SCALES)})s?(?![a-z])")
# After a number.
_MULTIPLE = re.compile(
    rf"(?i)\d\s+(?:(?:{'|'.join(SCALES)})s?|or|and an?|and one|minus|plus|divided|multiplied|mod"
    r"|tens|halves|(?:thir|four|fif|six|seven|eigh|nin|ten)ths|thirds"
    r"|(?:hundred|thousand|million|billion)ths|squared|cubed|factorial|choose|remainder)(?![a-z])"
)
# After a value, instead of a unit.
NO_UNIT = re.compile(
    r"(?i)(?<![a-z])(?:or|and|not|no|if|when|where|for|mod|than|least|most|either|between|to|but|plus|minus|divided"
    r"|multiplied|choose|squared|cubed|factorial|remainder|is|wrong|approx|approximately|roughly"
    r"|incorrect|wait|halves|tens|(?:thir|four|fif|six|seven|eigh|nin|ten)ths|thirds|(?:hundred|thousand|million|billion)"
    r"ths)(?![a-z])|n't"
)


def changes_its_number(sentence: str) -> bool:
    """Whether a sentence with one number does not give just that: `half of 18`, `not 18`, `18 dozen`."""
    clauses = re.split(r"[,;:]\s", sentence)
    clause = next((clause for clause in clauses if re.search(r"\d", clause)), sentence)
    return any(pattern.search(clause) for pattern in (_DOUBT, _BOUND, _MULTIPLE))


def taken_back(answer: str, rest: str) -> bool:
    """Whether the text after an answer says that it is wrong, or gives another."""
    if _DENIED.match(rest):
        return True
    rest = rest.lower().replace("’", "'")
    for words in _SECOND_THOUGHT.finditer(rest):
        lead = _LEAD_IN.search(rest, max(0, words.start() - 120), words.start())
        other = words["other"]
        if lead and (other is None or (lead["lead"] and other not in answer)):
            return True
    return False


# Right after an answer.
_DENIED = re.compile(
    r"(?i)[\s$*.)\]]{0,9}(?:, but (?:this|that|it) )?(?:(?:is|was) (?:wrong|incorrect|not (?:right|correct|the answer))"
    r"|(?:isn|wasn)['’]t (?:right|correct|the answer))"
)
# In lower case, and apart from what leads to it: a pattern that begins with a few letters skips the rest of a text,
# one that begins with any mark or space takes half a second, with the GIL, for 200,000 of them.
_SECOND_THOUGHT = re.compile(
    r"\b(?:(?:that|this|it)(?:(?:'s| is| was) (?:not (?:right|correct)|wrong|incorrect)"
    r"|(?: isn| wasn)'t (?:right|correct))|scratch that|let me (?:redo|recompute|recalculate|try again|start over)"
    r"|i (?:made (?:a|an) (?:mistake|error)|was wrong)"
    r"|(?:it|the (?:correct |right )?answer)(?:'s| is| should be) \$?(?P<other>-?\d[\d,.]*\d|\d)(?![\d.]*[a-z]))"
)
# The start of a sentence: "a common mistake is 20, which is wrong" takes nothing back. Bounded, or a page of empty
# lines takes minutes.
_LEAD_IN = re.compile(
    r"(?m)(?:^|[.!?})\]$][\s$*]{0,9})\s{0,9}"
    r"(?P<lead>(?:(?:wait|hmm+|no|oops|sorry|but|actually|correction)[\s,.:!…]{1,9}){0,5})\Z"
)
