"""The console: exact lines, with and without down-sampling, wide and narrow, Unicode and ASCII."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pods_plugin.reporting import StepConsole, StepRecord
from pods_plugin.reporting.console import _format_phase, format_duration, format_value

VAL = "val-core/openai/gsm8k/acc/mean@1"
HEADER = [
    "           reward      group variance   rollouts               seconds                  time",
    " step     all    kept      all → kept  kept/made  generate  select  log-prob  update    left",
]


def plain_console(encoding: str = "utf-8", width: int | None = None) -> Console:
    return Console(file=io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n"), width=width)


def lines(console: Console) -> list[str]:
    console.file.flush()
    return console.file.buffer.getvalue().decode(console.file.encoding).split("\n")[:-1]


def show(rows, console=None, total=10, **options):
    console = console or plain_console()
    step_console = StepConsole(console, total, **options)
    for row in rows:
        step_console.add(StepRecord(**row))
    return lines(console)


def test_lines_with_down_sampling(pods_row):
    rows = [
        {"step": 0, "data": {VAL: 0.125}},
        pods_row(1, 0.2),
        pods_row(2, 0.3125, **{VAL: 0.25, "timing_s/testing": 6}),
    ]
    assert show(rows) == [
        "validation at step 0: openai/gsm8k/acc 0.125",
        *HEADER,
        " 1/10   0.200   0.450   0.125 → 0.250      16/64      2.00   0.062      0.50    1.25     36s",
        " 2/10   0.312   0.450   0.125 → 0.250      16/64      2.00   0.062      0.50    1.25     56s",
        "validation at step 2: openai/gsm8k/acc 0.250",
    ]


def test_without_down_sampling_the_columns_of_kept_rollouts_are_dashes(plain_row):
    assert show([plain_row(1, 0.2)])[2:] == [
        " 1/10   0.200       -               -          -      2.00       -      0.50    1.25     36s",
    ]


def test_header_again_after_25_lines_and_nothing_wider_than_100(pods_row):
    printed = show([pods_row(step, 0.5) for step in range(1, 61)], total=100_000)
    assert [index for index, line in enumerate(printed) if "generate" in line] == [1, 28, 55]
    assert len(printed) == 60 + 3 * 2
    assert max(map(len, printed)) <= 100
    assert not any("\x1b" in line for line in printed)


@pytest.mark.parametrize("width", range(24, 121))
def test_any_width_keeps_its_columns_aligned(width, pods_row):
    _, titles, *steps = show([pods_row(step, 0.5) for step in (1, 10)], width=width)
    assert {len(titles)} == {len(step) for step in steps}
    assert len(titles) <= width
    assert titles.split()[:2] == ["step", "all"]


def test_narrow_terminals_lose_the_details_first(pods_row):
    row = [pods_row(1, 0.5)]
    titles = {width: " ".join(show(row, width=width)[1].split()) for width in (80, 60, 40, 12)}
    assert titles[80] == "step all kept all → kept kept/made gen select logp update left"
    assert titles[60] == "step all kept all → kept kept/made gen left"
    assert titles[40] == "step all kept left"
    assert titles[12] == "step all"


def test_a_terminal_sets_the_width_and_a_file_does_not(pods_row):
    terminal = Console(file=io.StringIO(), force_terminal=True, width=60, color_system=None)
    StepConsole(terminal, 10).add(StepRecord(**pods_row(1, 0.5)))
    assert "select" not in terminal.file.getvalue()
    assert "select" in show([pods_row(1, 0.5)], plain_console(width=60))[1]


def test_ascii_where_the_encoding_is_not_unicode(pods_row):
    printed = show([pods_row(1, 0.5, **{VAL: 0.5})], plain_console("ascii"))
    assert "all -> kept" in printed[1]
    assert "0.125 -> 0.250" in printed[2]
    assert "\n".join(printed).isascii()


def test_a_resumed_run_says_so_once(pods_row):
    printed = show([pods_row(5, 0.5), pods_row(6, 0.5)], start_step=4)
    assert printed[0] == "resumed after step 4 of 10"
    assert sum("resumed" in line for line in printed) == 1


def test_many_validations_wrap(pods_row):
    row = {"step": 3, "data": {f"val-core/source_{index}/acc/mean@1": 0.5 for index in range(8)}}
    printed = show([row])
    scores = [f"source_{index}/acc 0.500" for index in range(8)]
    assert printed == ["validation at step 3: " + ", ".join(scores[:3]) + ",", "  " + ", ".join(scores[3:])]


def test_time_left_ignores_a_slow_step_and_spreads_checkpoints(plain_row):
    console = StepConsole(plain_console(), 20)
    for step in range(1, 9):
        more = {"timing_s/step": 100.0} if step == 1 else {}
        if step == 8:
            more = {"timing_s/step": 20.0, "timing_s/save_checkpoint": 16.0, "timing_s/testing": 8.0}
        console.add(StepRecord(**plain_row(step, 0.5, **more)))
    assert console.seconds_left(8) == 12 * (4.0 + (16.0 + 8.0) / 8)
    assert console.seconds_left(20) == console.seconds_left(21) == 0.0


def test_formats():
    assert [format_value(value) for value in (None, 0.0, -0.1239, 12.3456, 123.456, -12345.6)] == [
        "-",
        "0.000",
        "-0.124",
        "12.346",
        "123.5",
        "-1.235e+04",
    ]
    assert [format_duration(seconds) for seconds in (0, 59.4, 59.6, 232, 3900, 86400 * 2 + 3 * 3600 + 5)] == [
        "0s",
        "59s",
        "1m 00s",
        "3m 52s",
        "1h 05m",
        "2d 03h",
    ]
    assert [_format_phase(seconds) for seconds in (0, 0.0123, 0.0996, 1.234, 9.996, 99.96, 12345)] == [
        "0.000",
        "0.012",
        "0.10",
        "1.23",
        "10.0",
        "100",
        "12345",
    ]
