"""One tool call while it is open: a stack of nested elements, and the JSON of its arguments as it streams.

The call itself is the element at the bottom, its parameters are the elements in it. A parameter that is a string is
written as its text comes, any other when it is complete, since only then is its type known; an array when something
else follows it, since its name may come again with more items. Deeper elements are kept until their parameter is
complete.
"""

import re
from collections.abc import Callable, Sequence

from m3jax.text.output.element import Element
from m3jax.text.output.marks import LOOSE, MARKED, NAMESPACE, invoked
from m3jax.text.output.pieces import Pieces, as_json, json_grains
from m3jax.text.output.shapes import Shapes, kinds_of, member_shapes, names_member
from m3jax.text.output.values import MOST_DEPTH, joined_value

_LEADING_MARKER = re.compile(rf"\A\s*{re.escape(NAMESPACE)}")


class Call:
    """An incremental reader of one tool call.

    Args:
        name: of the tool.
        index: of the call.
        shapes: the alternatives of the tool's schema for the arguments.
        pieces: receives the JSON of the arguments.
        fault: called with a line for each repair or drop.

    Attributes:
        after: the state that follows once the call is closed: "block", "outside", or "call" for the next call; None
            while it is open.
    """

    def __init__(self, name: str, index: int, shapes: Shapes, pieces: Pieces, fault: Callable[[str], None]):
        self.name, self.index, self.after = name, index, None
        self._elements = [Element(name, shapes, is_call=True)]
        self._pieces, self._fault = pieces, fault
        self._has_brace = False
        self._arrays: list[Element] = []  # closed elements of one name, an array that may go on

    def pattern(self) -> re.Pattern[str]:
        """Return the pattern of the tags to look for in the innermost open element."""
        return LOOSE if self._elements[-1].is_loose else MARKED

    def add(self, text: str) -> None:
        """Take text in the innermost open element."""
        element = self._elements[-1]
        if element.is_streamed:
            self._write(json_grains(as_json(text)[1:-1]))
        else:
            element.add(text)
            self._stream(element)

    def tag(self, match: re.Match[str]) -> None:
        """Take a tag in the innermost open element; a tag that is not valid there is taken as text."""
        element, tag, has_marker = self._elements[-1], match["tag"], match["marker"] is not None
        if tag.startswith("/"):
            is_tag = self._close_tag(tag[1:], has_marker)
        elif element.is_text:
            is_tag = False
        elif is_tag := invoked(tag) is not None and (has_marker or element.is_call):
            self._fault(f"call {self.index} was not closed before the next")
            self._end("call")
        else:
            is_tag = self._open_tag(tag, has_marker)
        if not is_tag:
            self.add(match[0])
        elif not has_marker:
            self._fault(f"<{tag}> in call {self.index} has no marker")

    def _open_tag(self, name: str, has_marker: bool) -> bool:
        """Open an element within the innermost open one; return False if the tag is text there."""
        parent = self._elements[-1]
        is_known = names_member(parent.shapes, name)
        if len(self._elements) > MOST_DEPTH or (not has_marker and (parent.has_words or not is_known)):
            return False
        if parent.is_call and name == "tool_call" and not is_known:
            self._fault(f"<{name}> within call {self.index} is ignored")
            return True
        if parent.has_words:
            self._fault(f"text beside <{name}> in call {self.index} is dropped")
        parent.forget_text()
        element = Element(name, member_shapes(parent.shapes, name, len(parent.elements)), has_marker)
        if parent.is_call and self._arrays and self._arrays[0].name != name:
            self._write_array()
        if name in parent.names and (parent.is_call or not (parent.is_array or name == "item")):
            # What a stream has sent of a parameter cannot become a longer array.
            is_joined = element.may_repeat and (self._arrays or not parent.is_call)
            self._fault(
                f"a second <{name}> in call {self.index} is {'joined to the first' if is_joined else 'dropped'}"
            )
            element.is_dropped = not is_joined
        parent.names.add(name)
        self._elements.append(element)
        self._stream(element)
        return True

    def _close_tag(self, name: str, has_marker: bool) -> bool:
        """Close the innermost element of a name, and what is open in it; return False if the tag is text.

        Without the namespace marker a tag closes only the innermost element, if that was opened without it too, or the
        call itself if nothing else is open.
        """
        last = len(self._elements) - 1
        places = [depth for depth, element in enumerate(self._elements) if depth and element.name == name]
        # In an array that is called "item", the text <item> may be an item that lacks its markers: it is not closed by
        # the tag that closes the array.
        places = [each for each in places if has_marker and self._elements[each].has_marker] or places
        depth = places[-1] if places else 0 if name in ("invoke", "tool_call") else None
        if not has_marker and not (depth == last and (depth == 0 or not self._elements[last].has_marker)):
            return False
        if depth is None:
            return not self._elements[last].is_text and self._repair(name)
        if depth == 0:
            if name == "tool_call":
                self._fault(f"call {self.index} was not closed before its block")
            self._end("block" if name == "invoke" else "outside")
            return True
        self._close_down_to(depth + 1)
        self._close()
        return True

    def _repair(self, name: str) -> bool:
        """Repair a closing tag without an opening one: the text before it is the element's, if the schema has the name.

        The model left out the tag that opens it, or all of that tag but its marker.
        """
        parent = self._elements[-1]
        is_known = names_member(parent.shapes, name) or (parent.is_call and kinds_of(parent.shapes) is None)
        text = ""
        if is_known and name not in parent.names and len(self._elements) <= MOST_DEPTH:
            text = _LEADING_MARKER.sub("", parent.text())
        if text or parent.is_call:
            parent.forget_text()
        if not text.strip():
            self._fault(f"</{name}> in call {self.index} closes nothing")
            return True
        self._fault(f"<{name}> was missing in call {self.index}")
        self._open_tag(name, True)
        self.add(text)
        self._close()
        return True

    def _close_down_to(self, depth: int) -> None:
        """Close the elements that were left open, from the innermost down to the one at index `depth`."""
        while len(self._elements) > depth:
            self._fault(f"<{self._elements[-1].name}> was not closed in call {self.index}")
            self._close()

    def _close(self) -> None:
        """Finish the innermost element: write it if it is a parameter, else make it part of its parent."""
        element = self._elements.pop()
        if element.elements and element.has_words:
            self._fault(f"text within <{element.name}> in call {self.index} is dropped")
        if element.is_streamed:
            self._write(['"'])
        elif len(self._elements) > 1:
            self._elements[-1].elements.append((element.name, element.node()))
        elif element.may_repeat and not element.is_dropped:
            self._arrays.append(element)
        elif not element.is_dropped:
            self._write_value([element])

    def _write_array(self) -> None:
        """Write the array that might have gone on, if there is one."""
        if self._arrays:
            self._write_value(self._arrays)
            self._arrays = []

    def _write_value(self, elements: Sequence[Element]) -> None:
        """Write a parameter, which all of the elements are."""
        self._write_name(elements[0].name)
        value = joined_value([element.node() for element in elements], elements[0].shapes)
        is_parted = isinstance(value, str | list | dict)
        self._write(json_grains(as_json(value)) if is_parted else [as_json(value)])

    def _end(self, after: str) -> None:
        """Close the call, and what is open in it."""
        self._close_down_to(1)
        if self._elements[0].has_words:
            self._fault(f"text beside the parameters of call {self.index} is dropped")
        self._write_array()
        self._write(["}" if self._has_brace else "{}"])
        self.after = after

    def _stream(self, element: Element) -> None:
        """Begin to stream an element if it is a string parameter: write its text so far, and later text at once."""
        if element.is_text and len(self._elements) == 2 and not element.is_dropped:
            self._write_name(element.name)
            self._write(json_grains('"' + as_json(element.text())[1:-1]))
            element.forget_text()
            element.is_streamed = True

    def _write_name(self, name: str) -> None:
        self._write(json_grains(("," if self._has_brace else "{") + as_json(name) + ":"))
        self._has_brace = True

    def _write(self, grains: Sequence[str]) -> None:
        """Append to the arguments' JSON."""
        self._pieces.add("arguments", self.index, grains)
