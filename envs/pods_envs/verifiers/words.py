"""Words around a number that change what is said: hedges, denials, bounds, and multiples of the number."""

from __future__ import annotations

import re

# With one of these a text gives no number, or more than one.
_DOUBT = re.compile(
    r"(?i)(?<![a-z])(?:or|nor|not|never|none|neither|cannot|either|between|maybe|perhaps|possibly|probably|except|wrong"
    r"|incorrect|(?:could|might|may)(?: also)? be)(?![a-z])|n't(?![a-z])"
)
# Before a number.
_BOUND = re.compile(
    r"(?i)(?<![a-z])(?:at (?:least|most)|(?:more|less|fewer|greater|larger|smaller|higher|lower|other) than|up to|under"
    r"|over|above|below|within|exceeds?|about|around|approximately|roughly|nearly|almost|close to|negative|minus|plus"
    r"|double|twice|triple|base|root of|by|to the power of"
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
    rf"(?i)\d\s+(?:(?:{'|'.join(SCALES)})s?|tens|halves|(?:thir|four|fif|six|seven|eigh|nin|ten)ths|thirds"
    r"|(?:hundred|thousand|million|billion)ths|squared|cubed|factorial|choose|remainder)(?![a-z])"
)
# After a value, instead of a unit.
NO_UNIT = re.compile(
    r"(?i)(?<![a-z])(?:or|and|not|no|if|when|where|for|mod|than|least|most|either|between|to|but|plus|minus|divided"
    r"|multiplied|times|over|choose|squared|cubed|factorial|remainder|(?:sin|cos|tan|cot|sec|csc|log|ln)[a-z]?|exp|lim|is|wrong"
    r"|incorrect|wait|halves|tens|(?:thir|four|fif|six|seven|eigh|nin|ten)ths|thirds|(?:hundred|thousand|million|billion)"
    r"ths)(?![a-z])|n't"
)


def changes_its_number(sentence: str) -> bool:
    """Whether a sentence with one number does not give just that: `half of 18`, `not 18`, `18 dozen`."""
    return any(pattern.search(sentence) for pattern in (_DOUBT, _BOUND, _MULTIPLE))


# What takes an answer back that was given before.
RETRACTION = re.compile(
    r"(?i)\b(?:(?:that|this|it|which)(?:'s| is| was) (?:not (?:right|correct)|wrong|incorrect)|scratch that"
    r"|let me (?:redo|recompute|recalculate|try again|start over)|i made (?:a|an) (?:mistake|error)"
    r"|actually,? (?:it|the answer)(?:'s| is))\b"
)
