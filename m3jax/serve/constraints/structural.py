"""Structural tags, xgrammar's way to say where in an answer a grammar holds, as llguidance's Lark."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from m3jax.messages import shown

_MOST_DEPTH = 32
_REPEATED = {"optional": "?", "star": "*", "plus": "+"}


def structural_grammar(text: str) -> str:
    """Return the grammar of a structural tag.

    Args:
      text: JSON: {"type": "structural_tag", "format": {...}}, with the formats const_string, json_schema, regex,
        grammar, any_text, sequence, or, optional, star, plus, repeat, tag, triggered_tags and tags_with_separator; or
        the older {"structures": [{"begin", "schema", "end"}], "triggers": [...]}.

    Returns:
      A grammar for llguidance: Lark, or JSON that has several.

    Raises:
      ValueError: no such JSON, or a format that is not known.

    Source: xgrammar's "Structural Tag"; SMG 1.13.0 sends such for `tool_choice` with M3's parser.
    """
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"structural_tag is no JSON: {error}") from None
    if not isinstance(tag, Mapping):
        raise ValueError(f"structural_tag = {shown(tag)}: must be an object with a format")
    if "structures" in tag:
        tags = [
            {"begin": each.get("begin"), "content": {"type": "json_schema", "json_schema": each.get("schema", {})}}
            | {"end": each.get("end")}
            for each in tag["structures"]
        ]
        tag = {"format": {"type": "triggered_tags", "triggers": tag.get("triggers", []), "tags": tags}}
    tags = _Tags()
    lines = [f"start: {tags.of(tag.get('format'), None, 0)}", *tags.lines]
    if not tags.grammars:
        return "\n".join(lines)
    grammars = [{"name": "main", "lark_grammar": "\n".join(lines)}, *tags.grammars]
    return json.dumps({"grammars": grammars})


class _Tags:
    """Rules of a grammar as they are made.

    Attributes:
      lines: rules.
      grammars: that formats bring with them, under names of their own.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.grammars: list[dict[str, str]] = []
        self._number = 0

    def of(self, format: Any, end: str | None, depth: int) -> str:
        """Return what a format is on the right side of a rule.

        Args:
          format: xgrammar's object.
          end: the text that follows, and is part of what is returned; None where none does.
          depth: of formats around it.
        """
        kind = format.get("type") if isinstance(format, Mapping) else None
        if depth > _MOST_DEPTH:
            raise ValueError(f"structural_tag: formats nest deeper than {_MOST_DEPTH}")
        inner = lambda each: self.of(each, None, depth + 1)
        if kind == "any_text":
            return self._text(end, format.get("excludes", ()))
        if kind == "const_string":
            found = _literal(format["value"])
        elif kind == "json_schema":
            if format.get("style", "json") != "json":
                raise ValueError(f"structural_tag: style = {shown(format['style'])}: must be json")
            found = f"%json {json.dumps(format['json_schema'])}"
        elif kind == "regex":
            from llguidance import regex_to_lark

            found = f"/{regex_to_lark(format['pattern'], use_ascii='dw')}/"
        elif kind == "grammar":
            from llguidance import grammar_from

            name = f"grammar_{len(self.grammars)}"
            self.grammars.append({"name": name, "lark_grammar": grammar_from("grammar", format["grammar"])})
            found = f"@{name}"
        elif kind == "sequence":
            found = self._sequence(format["elements"], depth)
        elif kind == "or":
            found = f"({' | '.join(map(inner, format['elements']))})"
        elif kind in _REPEATED:
            found = f"({inner(format['content'])}){_REPEATED[kind]}"
        elif kind == "repeat":
            found = f"({inner(format['content'])}){{{int(format['min'])},{int(format['max'])}}}"
        elif kind == "tag":
            found = self._tag(format, depth)
        elif kind == "triggered_tags":
            found = self._triggered(format, depth)
        elif kind == "tags_with_separator":
            tag = self._rule("tag", " | ".join(map(inner, format["tags"])))
            separator = _literal(format["separator"]) if format["separator"] else ""
            more = "" if format.get("stop_after_first") else f" ({separator} {tag})*"
            found = f"{tag}{more}" if format.get("at_least_one") else f"({tag}{more})?"
        else:
            raise ValueError(f"structural_tag: a format of type {shown(kind)} is not known")
        return found if not end else f"{found} {_literal(end)}"

    def _rule(self, kind: str, right: str) -> str:
        self._number += 1
        name = f"{kind}_{self._number}"
        self.lines.append(f"{name}: {right}")
        return name

    def _text(self, end: str | None, excludes: Sequence[str] = ()) -> str:
        """Return any text that has none of some texts in it.

        It goes up to the first `end`, which is part of what is returned, or to the end of the answer.
        """
        self._number += 1
        name = f"text_{self._number}"
        attributes = f"[suffix={_literal(end)}]" if end else ""
        # One complement of all: a complement for each is a product of automata.
        without = f" & ~/(?s:.*)({'|'.join(map(_escaped, excludes))})(?s:.*)/" if excludes else ""
        self.lines += [f"{name}{attributes}: {name.upper()}", f"{name.upper()}: /(?s:.*)/{without}"]
        return name

    def _sequence(self, elements: Sequence[Any], depth: int) -> str:
        """Return formats one behind the other; a text in front of a constant one ends with the first of it."""
        found, number = [], 0
        while number < len(elements):
            following = elements[number + 1] if number + 1 < len(elements) else {}
            is_text = elements[number].get("type") == "any_text"
            end = following.get("value") if is_text and following.get("type") == "const_string" else None
            if is_text and end is None and number + 1 < len(elements):
                raise ValueError(
                    "structural_tag: any_text in a sequence must be the last, or stand before a const_string"
                )
            found.append(self.of(elements[number], end, depth + 1))
            number += 1 if end is None else 2
        return " ".join(found)

    def _tag(self, tag: Mapping[str, Any], depth: int, begun: str = "") -> str:
        """Return a tag without the beginning that stands already."""
        ends = tag["end"] if isinstance(tag["end"], list) else [tag["end"]]
        begin = tag["begin"].removeprefix(begun)
        bodies = [self.of(tag["content"], end, depth + 1) for end in ends]
        return f"{_literal(begin) if begin else ''} ({' | '.join(bodies)})"

    def _triggered(self, format: Mapping[str, Any], depth: int) -> str:
        """Return free text in which a tag follows wherever a trigger has come."""
        tags, triggers = format["tags"], format["triggers"]
        segments = []
        for trigger in triggers:
            begun = [tag for tag in tags if tag["begin"].startswith(trigger)]
            if not trigger or not begun:
                raise ValueError(f"structural_tag: no tag begins with the trigger {shown(trigger)}")
            rest = " | ".join(self._tag(tag, depth, trigger) for tag in begun)
            segments.append(f"{self._text(trigger)} ({rest})")
        if lost := [tag["begin"] for tag in tags if not any(tag["begin"].startswith(each) for each in triggers)]:
            raise ValueError(f"structural_tag: the tag {shown(lost[0])} begins with none of the triggers")
        segment = self._rule("segment", " | ".join(segments))
        whole = self._rule("whole", " | ".join(self._tag(tag, depth) for tag in tags))
        tail = self._text(None)
        if format.get("stop_after_first"):
            return whole if format.get("at_least_one") else f"({segment} | {tail})"
        return f"{whole if format.get('at_least_one') else ''} {segment}* {tail}"


def _escaped(text: Any) -> str:
    """Return a text as a pattern that matches it and can stand between slashes."""
    _literal(text)  # a text at all
    return re.sub(r"[\\.+*?()|\[\]{}^$/]", lambda match: f"\\{match[0]}", text).replace("\n", r"\n")


def _literal(text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError(f"structural_tag: {shown(text)} is no text")
    return json.dumps(text, ensure_ascii=False)
