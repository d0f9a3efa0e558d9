"""The size of what one step of a chat template would make, looked at before it is made."""

import time

import pytest

from m3jax.text import ChatTemplate
from m3jax.text.chat import template as templates
from m3jax.text.chat.template import _check_step, _check_until

# A step, its left side, and its right side for a number n, such that it makes a value of about n at most: by definition
# its length, and of numbers their octal digits.
STEPS = {
    "* of a text": ("*", "ab", lambda n: (n // 2,)),
    "* of a text, from the right": ("*", 5, lambda n: ("x" * (n // 5),)),
    "* of a list": ("*", [1, 2, 3, 4], lambda n: (n // 4,)),
    "* of numbers": ("*", 8**500, lambda n: (8 ** (n - 501),)),
    "** of numbers": ("**", 8**4, lambda n: (n // 4,)),
    "center": ("center", "x", lambda n: (n,)),
    "ljust": ("ljust", "x", lambda n: (n, "-")),
    "zfill": ("zfill", "x", lambda n: (n,)),
    "indent": ("indent", "a\nb\nc\nd", lambda n: (n // 4,)),
    "expandtabs": ("expandtabs", "\t\t\t", lambda n: (n // 4,)),
    "replace": ("replace", "a-a-a-a-", lambda n: ("a", "x" * (n // 4))),
    "replace, at most so often": ("replace", "aaaa", lambda n: ("a", "x" * (n // 4), 9)),
    "join": ("join", "--", lambda n: (["xyz"] * (n // 5),)),
    "%": ("%", "%1000d|", lambda n: (5,)),
    "% with a width among the values": ("%", "%*d", lambda n: ((n, 5),)),
    "format": ("format", "{:1000}", lambda n: (5,)),
    "format with a width among the values": ("format", "{:{}}", lambda n: ("x", n)),
}


@pytest.fixture
def a_thousand(monkeypatch):
    monkeypatch.setattr(templates, "_MOST_CHARACTERS", 1000)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_up_to_the_limit_and_beyond(a_thousand, monkeypatch, name):
    step, left, others = STEPS[name]
    _check_step(step, left, *others(1000))
    if "%" in name or ("format" in name and "among" not in name):
        monkeypatch.setattr(templates, "_MOST_CHARACTERS", 999)
    with pytest.raises(
        ValueError, match=f"one step, {'[*]' * step.count('*') or step}, would make a value longer than"
    ):
        _check_step(step, left, *others(1005))


def test_steps_that_make_nothing_long(a_thousand):
    """A sum, another method, a number among the values of a format, a product with what is no number."""
    for step, left, others in (
        ("+", "x" * 900, ("y" * 900,)), ("upper", "x" * 2000, ()), ("%", "%d and %s", (5000, "x" * 900)),
        ("*", "ab", (1.5,)), ("**", 2.5, (900,)), ("%", 7, (5000,)), ("join", "-", ("text",)),
        ("*", "x", (-5,)), ("*", True, ("xx",)),
    ):  # fmt: skip
        _check_step(step, left, *others)


def test_the_limits_of_a_rendering(monkeypatch):
    """60 seconds, 64 Mi characters or entries of a value, 1 MiB of a file: each is allowed to its end."""
    assert (templates._MOST_SECONDS, templates._MOST_CHARACTERS, templates._MOST_BYTES) == (60, 67_108_864, 1_048_576)
    monkeypatch.setattr(templates, "_MOST_CHARACTERS", 10)
    check = _check_until(time.monotonic() + 60)
    for value in ("x" * 10, [1] * 10, (1,) * 10, 10**20, None, {number: 1 for number in range(20)}):
        assert check(value) is value
    for value in ("x" * 11, [1] * 11, (1,) * 11):
        with pytest.raises(ValueError, match="longer than 10 characters or entries"):
            check(value)
    with pytest.raises(ValueError, match="it takes more than 60 seconds"):
        _check_until(time.monotonic() - 1)()


def test_a_file_of_a_mebibyte_is_read(tmp_path):
    for extra in (0, 1):
        path = tmp_path / "chat_template.jinja"
        path.write_text("{# " + "x" * ((1 << 20) - 6 + extra) + " #}")
        if not extra:
            assert ChatTemplate.from_file(path).render([{"role": "user", "content": "a"}]) == ""
        else:
            with pytest.raises(ValueError, match="bytes"):
                ChatTemplate.from_file(path)
