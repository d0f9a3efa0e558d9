"""The marks of the output format, and patterns that find them in text that comes in pieces.

    block  := NS "<tool_call>" space (call space)* NS "</tool_call>"
    call   := NS '<invoke name="' NAME '">' element* NS "</invoke>"
    element := NS "<" KEY ">" (text | element*) NS "</" KEY ">"

NS is the namespace marker. Text is not escaped: what is a mark and what is text depends on where it stands, and the
machine decides that. A pattern here matches a mark, or a mark's beginning at the end of the text, for which the group
"tag" is None: only more text will show what it is.
"""

import re

NAMESPACE = "]<]minimax[>["
THINK, END_THINK = "<mm:think>", "</mm:think>"
BLOCK = NAMESPACE + "<tool_call>"
MOST_NAME = 512  # characters between < and > of a tag; what is longer is text


def _begun(mark: str) -> str:
    """Return a pattern that matches every proper prefix of a mark at the end of the text."""
    letters = [re.escape(letter) for letter in mark[:-1]]
    return "(?:".join(letters) + ")?" * (len(letters) - 1) + r"\Z"


_NS = re.escape(NAMESPACE)
_INSIDE = f"<[^<>]{{0,{MOST_NAME}}}"

# Between blocks: what opens or closes reasoning, or opens a block.
OUTSIDE = {
    marks: re.compile(f"(?P<tag>{'|'.join(map(re.escape, marks))})|{'|'.join(map(_begun, marks))}")
    for marks in {(THINK, END_THINK, BLOCK), (THINK, END_THINK), (BLOCK,)}
}
# Within text of a call: only tags with the namespace marker.
MARKED = re.compile(f"(?P<marker>{_NS})<(?P<tag>[^<>]{{0,{MOST_NAME}}})>|{_NS}(?:{_INSIDE})?\\Z|{_begun(NAMESPACE)}")
# Where a tag is expected: also tags without the marker, which models forget.
LOOSE = re.compile(
    f"(?P<marker>{_NS})?<(?P<tag>[^<>]{{0,{MOST_NAME}}})>|(?:{_NS})?{_INSIDE}\\Z|{_NS}\\Z|{_begun(NAMESPACE)}"
)
# The inside of the tag that opens a call; the name in double quotes, in single ones, or in none.
INVOKE = re.compile(r"""invoke\s+name\s*=\s*(?:"(?P<double>[^"]+)"|'(?P<single>[^']+)'|(?P<bare>[^\s"'=]+))\s*""")


def invoked(tag: str) -> str | None:
    """Return the name of the tool that a tag calls; None for another tag."""
    match = INVOKE.fullmatch(tag)
    return match and (match["double"] or match["single"] or match["bare"])
