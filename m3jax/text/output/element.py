"""An element of a tool call while it is open: its text and elements so far, and whether it is known to be a string."""

from m3jax.text.output.shapes import Shapes, is_only_array, kinds_of
from m3jax.text.output.values import MOST_WORD, Node

_SCALARS = frozenset({"null", "boolean", "integer", "number"})
_STRUCTURES = frozenset({"array", "object"})


class Element:
    """A parameter, a member of an object or an item of an array; at the root of the stack the call itself.

    Attributes:
        name: of its tag.
        shapes: the schema's alternatives for its value.
        has_marker: whether its tag had the namespace marker; if not, the tag that closes it need not have it.
        is_text: True once it is certainly a string. Everything up to its end is then its text, other tags included.
        is_streamed: True if its text is written at once and not kept.
        is_dropped: True if its parent already had an element of this name.
        may_repeat: True if it can only be an array, which may be written in several elements of its name.
        elements: the closed elements within it.
        names: the names of all elements within it, closed or open.
    """

    def __init__(self, name: str, shapes: Shapes, has_marker: bool = True, is_call: bool = False):
        self.name, self.shapes, self.has_marker, self.is_call = name, shapes, has_marker, is_call
        kinds = kinds_of(shapes)
        self._may_be_text = not is_call and (kinds is None or "string" in kinds)
        self._has_other_words = kinds is not None and bool(kinds & _SCALARS)
        self.is_text = not is_call and kinds == {"string"}
        self.is_array = kinds is not None and "array" in kinds and "object" not in kinds
        self.may_repeat = is_only_array(shapes)
        # A tag may lack its marker where the schema allows no text.
        self.is_loose = is_call or not has_marker or (not self._may_be_text and bool(kinds & _STRUCTURES))
        self.is_streamed = self.is_dropped = False
        self.elements: list[tuple[str, Node]] = []
        self.names: set[str] = set()
        self.has_words = False
        self._parts: list[str] = []
        self._size = 0

    def add(self, text: str) -> None:
        """Append text, which settles that this is a string, unless it may yet be a number, a boolean or null."""
        self._parts.append(text)
        self._size += len(text)
        self.has_words = self.has_words or not text.isspace()
        if self._may_be_text and not self.is_text:
            self.is_text = self._size > MOST_WORD or (self.has_words and not self._has_other_words)

    def text(self) -> str:
        """Return the text that was kept."""
        return "".join(self._parts)

    def forget_text(self) -> None:
        """Drop the text that was kept, because it stood before an inner element and belongs to nothing."""
        self._parts, self._size, self.has_words = [], 0, False

    def node(self) -> Node:
        """Return the element as a node: its inner elements if it has any, else its text."""
        return self.elements or self.text()
