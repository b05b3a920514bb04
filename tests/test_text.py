"""Text shown while it grows: no half characters, no stop strings, nothing lost."""

import codecs
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dynajax
from dynajax.errors import ModelError
from dynajax.text import StopFilter, load_tokenizer

FOLDER = Path(dynajax.__file__).parent / "assets" / "tiny-relullama"
TOKENIZER = load_tokenizer(FOLDER)
START = TOKENIZER.encode("So")
END_OF_TEXT = 0
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
TEXTS = ["héllo wörld", "1 € is 1.1 $", "日本語 text", "ab 😀!", "👩‍🚀 family", " leading", "\n\ttabs\r\n", "z̸̡͜", "Ġ ĉ"]
CHECKED = settings(deadline=None, derandomize=True, max_examples=200)


def byte_of_letter():
    """The byte that each letter of a byte-level vocabulary stands for (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


LETTERS = byte_of_letter()


def raw_bytes(token):
    return bytes(LETTERS[letter] for letter in TOKENIZER._inner.id_to_token(token))


def streamed(ids, prompt=START):
    """Every piece, the flushed rest last."""
    stream = TOKENIZER.stream(prompt)
    return [*map(stream.push, ids), stream.flush()]


def test_ids_and_back():
    assert TOKENIZER.size == 4096
    for text in TEXTS:
        ids = TOKENIZER.encode(text)
        assert all(type(token) is int and 0 < token < 4096 for token in ids)
        assert TOKENIZER.decode(ids) == text
        assert b"".join(map(raw_bytes, ids)).decode() == text  # the table above is the right one
    assert TOKENIZER.encode("") == [] and TOKENIZER.decode([]) == ""
    assert TOKENIZER.decode([END_OF_TEXT, *START, END_OF_TEXT]) == "So"
    assert TOKENIZER.decode(TOKENIZER.encode("😀")[:2]) == UNFINISHED


@CHECKED
@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=20)), data=st.data())
def test_pieces_make_the_text(text, data):
    """Wherever a whole character ends the prompt; and each character is shown as soon as its bytes are there."""
    ids = TOKENIZER.encode("x" + text)
    ends = [n for n in range(1, len(ids)) if not TOKENIZER.decode(ids[:n]).endswith(UNFINISHED)]
    cut = data.draw(st.sampled_from([*ends, len(ids)]))
    known = TOKENIZER.decode(ids[:cut])
    stream, decoder = TOKENIZER.stream(ids[:cut]), codecs.getincrementaldecoder("utf-8")()
    shown, complete = "", ""
    for token in ids[cut:]:
        shown += stream.push(token)
        complete += decoder.decode(raw_bytes(token))
        assert complete.startswith(shown)
        if not decoder.getstate()[0] and not complete.endswith(UNFINISHED):
            assert shown == complete
    assert known + shown + stream.flush() == "x" + text


@CHECKED
@given(ids=st.lists(st.one_of(st.integers(0, 4095), st.integers(1, 256)), max_size=12))
def test_any_ids_are_streamed_as_they_decode(ids):
    pieces = streamed(ids)
    assert "".join(pieces) == TOKENIZER.decode(ids)
    assert not any(piece.endswith(UNFINISHED) for piece in pieces[:-1])


def test_an_unfinished_character_is_shown_only_at_the_end():
    ids = TOKENIZER.encode("a😀")
    assert len(ids) == 5 and "".join(streamed(ids)) == "a😀"
    assert streamed(ids) == ["a", "", "", "", "😀", ""]
    assert streamed(ids[:3]) == ["a", "", "", UNFINISHED]
    stream = TOKENIZER.stream(START)
    for token in ids[:3]:
        stream.push(token)
    assert [stream.flush(), stream.flush()] == [UNFINISHED, ""]  # once


def test_special_tokens_are_not_shown():
    assert streamed([END_OF_TEXT, *TOKENIZER.encode("a"), END_OF_TEXT]) == ["", "a", "", ""]
    assert streamed(TOKENIZER.encode(" b"), prompt=[END_OF_TEXT]) == [" b", ""]


def test_special_tokens_are_not_shown_without_a_prompt():
    assert streamed([END_OF_TEXT, *START], prompt=[]) == ["", "So", ""]


@pytest.mark.parametrize("cut", [2, 3, 4])
def test_a_prompt_that_ends_within_a_character(cut):
    ids = TOKENIZER.encode("a😀!")
    assert "".join(streamed(ids[cut:], prompt=ids[:cut])) in ("😀!", "!")


def test_ids_beyond_the_tokenizer_have_no_text():
    """Models pad their vocabulary."""
    assert streamed([4096, *START, 5000]) == ["", "So", "", ""]


def shown_by(stops, pieces):
    """Everything the filter lets through, and whether a stop string ended it."""
    stop_filter, shown = StopFilter(stops), ""
    for piece in pieces:
        text, stopped = stop_filter.push(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + stop_filter.flush(), False


def expected_of(stops, pieces):
    """Take pieces until all of them together hold a stop string; show what lies before the first."""
    text = ""
    for piece in pieces:
        text += piece
        found = [at for at in range(len(text)) for stop in stops if text.startswith(stop, at)]
        if found:
            return text[: min(found)], True
    return text, False


PIECES = st.lists(st.text("ab", max_size=4), max_size=8)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


@CHECKED
@given(stops=STOPS, pieces=PIECES)
def test_the_filter_against_its_oracle(stops, pieces):
    assert shown_by(stops, pieces) == expected_of(stops, pieces)


@CHECKED
@given(stops=STOPS, pieces=PIECES)
def test_no_more_is_held_back_than_could_become_a_stop_string(stops, pieces):
    stop_filter, shown, text = StopFilter(stops), "", ""
    beginnings = {stop[:n] for stop in stops for n in range(1, len(stop))}
    for piece in pieces:
        text += piece
        new, stopped = stop_filter.push(piece)
        shown += new
        if stopped:
            break
        held = max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)
        assert shown == text[: len(text) - held]


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["END"], ["the E", "N", "D of"], ("the ", True)),
        (["END"], ["the E", "N", "t"], ("the ENt", False)),
        (["END"], ["the E", "N"], ("the EN", False)),
        (["aab"], ["aa", "a", "b"], ("a", True)),  # the held text moves on by one
        (["abc", "b"], ["xab"], ("xa", True)),
        (["bcd", "cd"], ["ab", "c", "d"], ("a", True)),  # both end together: the earlier one counts
        (["\n\n"], ["a\n", "b\n", "\nc"], ("a\nb", True)),
        (["ab"], ["ab"], ("", True)),
        ([], ["a", "b"], ("ab", False)),
        (["never"], [], ("", False)),
    ],
)
def test_stop_strings(stops, pieces, expected):
    assert shown_by(stops, pieces) == expected == expected_of(stops, pieces)


def test_the_filter_starts_afresh_after_a_stop():
    stop_filter = StopFilter(["ab"])
    assert stop_filter.push("aa") == ("a", False)
    assert stop_filter.push("b") == ("", True)
    assert stop_filter.flush() == ""
    assert stop_filter.push("b") == ("b", False)


def test_a_folder_without_tokenizer(tmp_path):
    assert load_tokenizer(tmp_path) is None
    assert load_tokenizer(tmp_path / "absent") is None


@pytest.mark.parametrize("damage", ["empty", "object", "cut", "no-json", "binary", "folder"])
def test_a_broken_tokenizer(tmp_path, damage):
    whole = (FOLDER / "tokenizer.json").read_bytes()
    raw = {"empty": b"", "object": b"{}", "cut": whole[:-100], "no-json": b"hello", "binary": b"\xff\x00" * 50}
    path = tmp_path / "tokenizer.json"
    if damage == "folder":
        path.mkdir()
    else:
        path.write_bytes(raw[damage])
    with pytest.raises(ModelError) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.exit_code == 3
    assert str(path) in str(caught.value) and str(caught.value).isprintable()
