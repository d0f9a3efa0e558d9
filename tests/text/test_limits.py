"""Limits of the text room: what a schema, a conversation and a model's output may have, each to its end."""

import pytest
from support.chat_messages import assistant, call, result, user

from m3jax.text.chat import fields
from m3jax.text.chat.request import ordered_messages
from m3jax.text.output import shapes


def test_ids_of_calls_are_told_in_200_characters():
    for size in (18, 19):
        ids = ["x" * size, *(f"{number:08d}" for number in range(15))]
        calls, results = assistant(None, *map(call, ids)), [result(each) for each in ids[1:]]
        with pytest.raises(ValueError) as caught:
            ordered_messages([user("a"), calls, *results, result("another")])
        listed = ", ".join(map(repr, ids))  # of 200 characters, and of one more
        told = listed if size == 18 else f"{listed[:168]}... (33 more characters)"
        assert str(caught.value).partition("theirs are ")[2] == told


def test_keys_of_json_are_tags_where_they_become_some():
    """And nothing else is: an object of a tool's output may have any key, at any depth."""
    value = {"a>b": [{"": {"/a": 1.5}}]}
    assert fields.json_copy(value, "here") == value
    for inner, path in ((value, "here"), ({"a": [{"": 1}]}, r"here: a\.0")):
        with pytest.raises(ValueError, match=rf"^{path}: '.*' cannot be a tag"):
            fields.json_copy(inner, "here", are_tags=True)


def test_what_nests_64_deep_is_taken_and_nothing_deeper():
    """Lists and objects of JSON, alternatives of a schema by each keyword."""
    value = 1
    for _ in range(32):
        value = {"a": [value]}
    assert fields.json_copy(value, "here") == value
    with pytest.raises(ValueError, match="here: lists and objects nest deeper than 64"):
        fields.json_copy([value], "here")
    for keyword in ("anyOf", "oneOf", "allOf"):
        schema = {"type": "integer"}
        for _ in range(64):
            schema = {keyword: [schema]}
        assert shapes.kinds_of(shapes.shapes_of(schema, "here")) == {"integer"}
        with pytest.raises(ValueError, match="here: alternatives nest deeper than 64"):
            shapes.shapes_of({keyword: [schema]}, "here")
