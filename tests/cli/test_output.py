import json
import math

import pytest

from dynajax.cli.output import Answer, Bars, Lines, figure, progress, size, table, write_json, write_out


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**33, "8.0 GiB"), (2**60, "1048576.0 TiB")]
)
def test_sizes(count, text):
    assert size(count) == text
    assert size(None) == "n/a"


def test_figures_and_tables():
    assert figure(12.345) == "12.3"
    assert figure(0.256, ".1%") == "25.6%"
    assert figure(None) == "n/a"
    assert table([("a", "1"), ("long", "20 B")]) == "a        1\nlong  20 B"
    assert table([]) == ""


def test_json_is_one_line_and_refuses_what_is_no_json(capsys):
    write_json({"text": "a\nb☃", "none": None})
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {"text": "a\nb☃", "none": None}
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json({"x": math.nan})


def test_an_answer_streams_and_ends_its_line(capsys):
    answer = Answer(stream=True)
    for text in ("one", "", " two"):
        answer.add(text)
    assert capsys.readouterr().out == "one two"
    answer.close()
    assert capsys.readouterr().out == "\n"


def test_an_answer_that_ends_with_a_line_break_gets_no_second(capsys):
    answer = Answer(stream=True)
    answer.add("one\n")
    answer.close()
    assert capsys.readouterr().out == "one\n"


def test_an_answer_can_be_held_back_or_kept_silent(capsys):
    for silent, expected in ((False, "one two\n"), (True, "")):
        answer = Answer(stream=False, silent=silent)
        answer.add("one")
        answer.add(" two")
        assert capsys.readouterr().out == ""
        answer.close()
        assert capsys.readouterr().out == expected


def test_only_a_terminal_is_spared_control_characters(capsys, monkeypatch):
    text = "a\x1b[31mb\x07\tc\r\n"
    for terminal, expected in ((True, "a[31mb\tc\n"), (False, text)):
        monkeypatch.setattr("sys.stdout.isatty", lambda value=terminal: value)
        answer = Answer(stream=True)
        answer.add(text)
        assert capsys.readouterr().out == expected


def test_progress_lines_are_few(capsys):
    report = Lines(every_s=3600)
    for done in range(1, 101):
        report("load", done, 100)
    report("place", 2, 2)
    report.close()
    report("prefill", 1, 1)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "load: 100/100\nplace: 2/2\n")


def test_the_end_is_guessed_once_a_stage_has_lasted(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("dynajax.cli.output.time.monotonic", lambda: now[0])
    report = Lines(every_s=1)
    for now[0], done in ((0, 5), (5, 10), (20, 25), (30, 35), (40, 105), (41, 1005)):
        report("train", done, 1005)
    told = "train: 10/1005\ntrain: 25/1005, 16 min left\ntrain: 35/1005, 16 min left\n"
    assert capsys.readouterr().err == told + "train: 105/1005, 360 s left\ntrain: 1005/1005\n".replace("360 s", "6 min")


def test_planning_is_silent_however_long_it_takes(capsys):
    report = Lines(every_s=0)
    report("compile", 1, 2)
    report("compile", 2, 2)
    assert capsys.readouterr().err == ""
    report("load", 1, 2)
    assert capsys.readouterr().err == "load: 1/2\n"


def test_progress_is_a_bar_on_a_terminal_only(capsys, monkeypatch, bare_environment):
    assert isinstance(progress(), Lines)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(progress(), Lines)
    monkeypatch.setenv("TERM", "xterm-256color")
    bars = progress()
    assert isinstance(bars, Bars)
    bars("load", 1, 2)
    bars.close()
    bars.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "load" in captured.err


def test_no_color_is_honoured(capsys, monkeypatch, bare_environment):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    seen = {}
    for no_color in ("", "1"):
        monkeypatch.setenv("NO_COLOR", no_color)
        bars = Bars()
        bars("load", 1, 2)
        bars.close()
        seen[no_color] = capsys.readouterr().err
    assert "\x1b[38;5" in seen[""] or "\x1b[3" in seen[""]
    assert "\x1b[38;5" not in seen["1"]
    assert "\x1b[3" not in seen["1"]


def test_text_that_stdout_cannot_encode_is_replaced(monkeypatch):
    import io

    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    write_out("snow ☃")
    assert raw.getvalue() == b"snow ?"
