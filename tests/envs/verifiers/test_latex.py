"""The shortcuts of cleaning take nothing away."""

from hypothesis import given, settings
from hypothesis import strategies as st
from pods_envs.verifiers.latex import _RULES, closing_brace, closing_braces

LATEX = r"""
\\[2 pt] ; ** ; ` ; \left. ; \right . ; \Bigl ; \displaystyle ; \phantom{x} ; \tag*{1} ; 10,\!000 ; 1\;000
10{,}000 ; 11,\,050 ; 11, 050 ; \! ; \quad ; \( ; \] ; ~ ; $ ; \$ ; € ; \textdollar ; \tfrac ; \dbinom
\leqslant ; \leq ; <= ; \geqq ; >= ; \lt ; &lt; ; \gt ; &gt; ; \ne ; != ; \cdots ; \dotsc ; .... ; \varnothing
\lbrace ; \rbrace ; \langle ; \rangle ; &= ; \lvert ; \mathbb{R} ; \Bbb R ; ^\circ ; ^{\degree} ; \degree
\mathrm{e} ; \mathbf{x} ; \operatorname{lcm} ; \textbf ; \mbox ; \rm ; ^{\prime} ; \% ; percent ; Per Cent
\text{per cent} ; +\infty ; \text{a} ; {1\over2} ; \frac12 ; \frac{1}2 ; \frac\pi2 ; \sqrt2 ; \sqrt[3]x
sqrt(2) ; \sqrt(2) ; x_1 y ; x^2 z ; \pi 2 ; 1 ; 23 ; 000 ; x ; , ; { ; } ; \ ; [ ; ] ; ( ; ) ; \cr ; 1,000
\binom52 ; <<2*9=18>> ; \textcolor{red}{5} ; \Large ; \begin{aligned} ; \end{align*} ; \nicefrac ; ^\circ C
\sin 30^\circ ; \text{cm^2} ; 3\text{to}2 ; \text{1A}_ ; 0.\bar{3} ; 0.333\ldots ; sqrt ; 2pi ; infinity
\text{infinity} ; 1.2 x 10^5 ; sin x ; \frac{\sqrt{3}}2 ; {1+\sqrt{5}\over 2} ; \sqrt(2+(1))
"""
LATEX = [*(piece.strip() for line in LATEX.splitlines() for piece in line.split(" ; ")), " ", ";"]
pieces = st.lists(st.sampled_from(LATEX), max_size=12)
latex = st.one_of(pieces.map("".join), st.text("\\{}frac sqt,.$~<>=!123xR", max_size=30))


@settings(max_examples=500, deadline=None)
@given(latex)
def test_what_a_rule_is_looked_up_by_is_in_everything_that_it_matches(text):
    assert [rule for rule in _RULES if rule[1].search(text) and rule[0] not in text] == []


def test_every_rule_is_met_above():
    assert [rule for rule in _RULES if not any(rule[1].search(piece) for piece in LATEX)] == []


@given(st.text("{}\\a", max_size=30))
def test_the_closing_brace_of_one_is_that_of_all(text):
    ends = closing_braces(text)
    for start in (i for i, character in enumerate(text) if character == "{" and not _escaped(text, i)):
        assert closing_brace(text, start) == ends.get(start)


def _escaped(text: str, index: int) -> bool:
    before = text[:index]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1
