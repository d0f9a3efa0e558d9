"""Random JSON schemas, and random texts of a grammar."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from m3jax.decoding import Guide

NAMES = ("city", "days", "unit", "item", "a-b", "é")
STRINGS = ("", "C", "true", "12", "two words", "a\nb", "<b>", 'a"b', "naïve", "]<]")
# Patterns with both anchors, one, and none.
PATTERNS = ("^[a-c]{2,3}$", "^x", "[0-9]y$", "q", "^(ab|c)$")


def _numbers(kind: str) -> st.SearchStrategy:
    low = st.integers(-20, 20)
    ranged = low.flatmap(
        lambda a: st.fixed_dictionaries(
            {"type": st.just(kind), "minimum": st.just(a), "maximum": st.integers(a, a + 30)}
        )
    )
    return st.one_of(ranged, st.just({"type": kind, "exclusiveMinimum": 0, "maximum": 9}))


def _strings() -> st.SearchStrategy:
    sized = st.tuples(st.integers(0, 3), st.integers(0, 6)).map(
        lambda bounds: {"type": "string", "minLength": bounds[0], "maxLength": sum(bounds)}
    )
    return st.one_of(
        sized,
        st.lists(st.sampled_from(STRINGS), min_size=1, max_size=3, unique=True).map(lambda texts: {"enum": texts}),
        st.sampled_from(PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern, "maxLength": 9}),
    )


SCALARS = st.one_of(
    _strings(),
    _numbers("integer"),
    _numbers("number"),
    st.sampled_from(({"type": "boolean"}, {"type": "null"}, {"const": 3}, {"enum": [1, 2.5, None, True, "a"]})),
    st.just({"type": ["string", "null"], "maxLength": 5}),
)


def _larger(inner: st.SearchStrategy) -> st.SearchStrategy:
    arrays = st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
        lambda drawn: {"type": "array", "items": drawn[0], "minItems": drawn[1], "maxItems": drawn[1] + drawn[2]}
    )
    tuples = st.lists(inner, min_size=1, max_size=2).map(
        lambda parts: {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}
    )
    unions = st.lists(inner, min_size=2, max_size=3).map(lambda parts: {"anyOf": parts})
    return st.one_of(arrays, tuples, objects(inner), unions)


def objects(members: st.SearchStrategy) -> st.SearchStrategy:
    """Return schemas of objects, with additional properties ruled out."""
    properties = st.dictionaries(st.sampled_from(NAMES), members, min_size=1, max_size=4)
    return properties.flatmap(
        lambda named: st.sets(st.sampled_from(sorted(named))).map(
            lambda required: {
                "type": "object",
                "properties": named,
                "required": sorted(required),
                "additionalProperties": False,
            }
        )
    )


VALUES = st.recursive(SCALARS, _larger, max_leaves=6)
OBJECTS = objects(VALUES)


def allowed(bits: np.ndarray) -> np.ndarray:
    """Return the ids of the tokens that a guide's answer lets through."""
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))


def walk(guide: Guide, eos_id: int, seed: int, prefer: Sequence[int] = (), most: int = 600) -> list[int]:
    """Return random tokens that a guide allows, to the end of the answer.

    Behind 40 tokens one of `prefer` is taken where it may come, as a model would that wants to end.
    """
    rng, new = np.random.default_rng(seed), []
    while len(new) < most:
        tokens = allowed(guide.bits(new))
        assert len(tokens), f"no token may follow {new}"
        if eos_id in tokens and rng.random() < 0.7:
            return new
        wanted = [token for token in prefer if token in tokens] if len(new) > 40 else []
        token = int(wanted[0] if wanted else rng.choice(tokens))
        if token == eos_id:
            return new
        new.append(token)
    raise AssertionError("the answer does not end")
