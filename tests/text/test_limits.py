"""Limits of the text room: what a template, a tokenizer, a schema and a model's output may have, each as documented."""

from m3jax.text import stream, tokenizer
from m3jax.text.chat import fields, schemas
from m3jax.text.output import machine, marks, pieces, shapes, values


def test_limits():
    """A tag of 512 characters is one, a word of 64 may be a number, 32 faults of 160 characters are told."""
    assert (tokenizer._MOST_BYTES, tokenizer._MOST_ITEMS) == (256 << 20, 5_000_000)
    assert (fields.MOST_DEPTH, values.MOST_DEPTH, shapes.MOST_DEPTH, shapes.MOST_ALTERNATIVES) == (64, 64, 64, 64)
    assert (schemas._MOST_STEPS, schemas._MOST_PROBLEMS, schemas._MOST_LINE) == (10_000, 8, 160)
    assert (machine._MOST_FAULTS, machine._MOST_FAULT, marks.MOST_NAME, values.MOST_WORD) == (32, 160, 512, 64)
    assert (values._MOST_DIGITS, values._EXACT, pieces._GRAIN) == (4_000, 9_007_199_254_740_992, 32)
    assert stream._MOST_LEADING >= 1
