"""The size of what one step of a chat template would make, looked at before it is made."""

import pytest

from m3jax.text import ChatTemplate
from m3jax.text.chat import template as templates

HI = [{"role": "user", "content": "Hi"}]
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


def made(step, left, *others) -> str:
    """What a template says that makes this step and shows nothing of it; the error if it cannot be made."""
    if step in ("*", "**", "%"):
        expression = f"left {step} right[0]"
    else:
        expression = f"left | {step}(*right)" if step == "indent" else f"left.{step}(*right)"
    source = f"{{% set made = {expression} %}}made"
    try:
        return ChatTemplate(source).render(HI, left=left, right=others)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_up_to_the_limit_and_beyond(a_thousand, monkeypatch, name):
    step, left, others = STEPS[name]
    assert made(step, left, *others(1000)) == "made"
    if "%" in name or ("format" in name and "among" not in name):
        monkeypatch.setattr(templates, "_MOST_CHARACTERS", 999)
    assert f"one step, {step}, would make a value longer than" in made(step, left, *others(1005))


def test_steps_that_make_nothing_long(a_thousand):
    """Another method, a number among the values of a format, a product with what is no number."""
    for step, left, others in (
        ("%", "%d and %s", ((5000, "x" * 900),)), ("**", 2.5, (900,)), ("%", 7, (5000,)), ("join", "-", ("text",)),
        ("*", "x", (-5,)), ("*", True, ("xx",)),
    ):  # fmt: skip
        assert "one step" not in made(step, left, *others), step


def test_values_and_texts_up_to_the_limit_and_beyond(monkeypatch):
    """So many characters or entries are allowed, and one more is not."""
    monkeypatch.setattr(templates, "_MOST_CHARACTERS", 10)
    for source in ("{% set x = value ~ '' %}", "{{ value }}", "{% set x = value + value[:0] %}"):
        template = ChatTemplate(source)
        assert template.render(HI, value="x" * 10).strip("x") == ""
        with pytest.raises(ValueError, match="longer than 10 characters"):
            template.render(HI, value="x" * 11)
    entries = ChatTemplate("{% set x = value + value[:0] %}")
    assert entries.render(HI, value=[1] * 10) == ""
    with pytest.raises(ValueError, match="a value longer than 10 characters or entries"):
        entries.render(HI, value=[1] * 11)
