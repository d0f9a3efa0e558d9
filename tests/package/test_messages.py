"""Text from files in error messages: escaped, short, and with all problems in the notes."""

import pytest

from m3jax.messages import listed, note_problems, printable, shortened, shown

ESCAPED = {
    "\x1b[31mred\x07": "\\x1b[31mred\\x07",
    "a\nb\r": "a\\nb\\r",
    "\u202eabc": "\\u202eabc",
    "\ud800": "\\ud800",
    "日本 é \\": "日本 é \\",
}


@pytest.mark.parametrize("text", ESCAPED)
def test_no_character_that_a_terminal_obeys(text):
    assert printable(text) == ESCAPED[text]


@pytest.mark.parametrize("length", [0, 2000, 2001, 10**6])
def test_a_message_has_at_most_2000_characters(length):
    short = shortened("x" * length)
    assert len(short) <= 2000
    if length <= 2000:
        assert short == "x" * length
    else:
        kept = short.index("...")
        assert short[kept:] == f"... ({length - kept} more characters)", "it says how much it leaves out"


VALUES = {"integer": 10**5000, "list": [10**5000], "text": "\x1b" * 10**5, "object": {"a": ["b"] * 10**4}, "null": None}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_any_value_is_shown_in_a_few_printable_characters(value):
    assert 0 < len(shown(value)) <= 80 and shown(value).isprintable()


def test_a_value_that_holds_itself_or_nests_too_deep_is_shown():
    nested = []
    for _ in range(10**4):
        nested = [nested]
    assert shown(nested) == "a list"


def test_the_first_eight_and_how_many_more():
    problems = [f"{i}\x1b" + "x" * 500 for i in range(156)]
    text = listed(problems)
    assert text.isprintable() and len(text) < 2000
    assert [part[0] for part in text.split("; ")] == [*"01234567", "a"]
    assert text.endswith("; and 148 more")
    assert listed(problems[:2], separator="\n").count("\n") == 1


def test_the_notes_have_every_problem_where_the_message_has_not():
    error, small = ValueError("many"), ValueError("few")
    note_problems(error, [f"problem\t{i}" for i in range(9)])
    note_problems(small, ["one", "two"])
    assert error.__notes__ == [f"problem\\t{i}" for i in range(9)]
    assert not hasattr(small, "__notes__")
