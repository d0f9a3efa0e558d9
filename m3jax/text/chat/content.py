"""The content of a message: text and media in one spelling, and the assistant's reasoning apart from its answer."""

from collections.abc import Mapping
from typing import Any

from m3jax.messages import shown
from m3jax.text.chat.fields import check_fields, json_copy

THINK, END_THINK = "<mm:think>", "</mm:think>"
# The types of parts that clients write, and those that a template knows.
PART_TYPES = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}

Content = str | list[str | dict[str, Any]]


def ordered_content(content: Any, location: str) -> Content:
    """Write a content in the spelling of templates.

    Args:
        content: a text, or a list of texts and parts.
        location: its place in the request, for errors.

    Returns:
        A text, or a list of texts and of parts whose type is "text", "image" or "video". The other fields of an
        image or video part, such as its address, are kept for the code that reads it.

    Raises:
        ValueError: neither, or a part that no template shows.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{location}: content is a text or a list of parts, got {shown(content)}")
    return [_part(part, f"{location}, part {number}") for number, part in enumerate(content, 1)]


def ordered_result(content: Any, location: str) -> Content:
    """Write the content of a tool's result in the spelling of templates.

    Args:
        content: as in `ordered_content`; a part may also be {"output": value}, which is the value's text, as M3's
            template writes it: of a list or an object that is Python's, not JSON.
        location: its place in the request, for errors.

    Returns:
        As `ordered_content`.

    Raises:
        ValueError: as `ordered_content`, or an output that JSON cannot hold.
    """
    if isinstance(content, list):
        content = [_without_output(part, f"{location}, part {number}") for number, part in enumerate(content, 1)]
    return ordered_content(content, location)


def _without_output(part: Any, location: str) -> Any:
    """Return a part that has an output as a part of its text; any other as it is."""
    if not isinstance(part, Mapping) or part.get("output") is None or part.get("type") not in (None, "text", "output"):
        return part
    check_fields(part, ("type", "output"), location, "a part with an output")
    return {"type": "text", "text": str(json_copy(part["output"], f"{location}: output"))}


def _part(part: Any, location: str) -> str | dict[str, Any]:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise ValueError(f"{location}: a part is a text or an object with a type, got {shown(part)}")
    part_type = part.get("type")
    if not isinstance(part_type, str) or part_type not in PART_TYPES:
        raise ValueError(
            f"{location}: type = {shown(part_type)} would not reach the model: it is one of {', '.join(PART_TYPES)}"
        )
    if PART_TYPES[part_type] != "text":
        return {**part, "type": PART_TYPES[part_type]}
    check_fields(part, ("type", "text"), location, "a text part")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{location}: text = {shown(part.get('text'))}: must be a text")
    return {"type": "text", "text": part["text"]}


def reasoning_and_content(message: Mapping[str, Any], content: Content, location: str) -> tuple[str, Content]:
    """Separate the assistant's reasoning from the rest of its content.

    Args:
        message: with `reasoning_content` or `reasoning`, of which an empty one says nothing.
        content: of the message, in order. Where no reasoning is given apart, it may begin with it:
            "<mm:think>thought</mm:think>said", or without the first mark, which a prompt ends with where thinking is
            enabled.
        location: its place in the request, for errors.

    Returns:
        The reasoning, "" for none, and the rest of the content. Line breaks beside marks that stood in the content
        belong to neither.

    Raises:
        ValueError: two reasonings that differ; text before the marks, or marks twice: a template would drop some of it.
    """
    given = {name: message.get(name) for name in ("reasoning_content", "reasoning")}
    for name, reasoning in given.items():
        if not isinstance(reasoning, str | None):
            raise ValueError(f"{location}: {name} = {shown(reasoning)}: must be a text or null")
    distinct = {reasoning for reasoning in given.values() if reasoning}
    if len(distinct) > 1:
        raise ValueError(f"{location}: reasoning and reasoning_content say different things; give one of them")
    if distinct:
        return distinct.pop(), content
    parts = [content] if isinstance(content, str) else content
    texts = [part if isinstance(part, str) else part["text"] for part in parts if not _is_medium(part)]
    text = "".join(texts)
    if END_THINK not in text:
        return "", content
    before, _, answer = text.partition(END_THINK)
    before_thought, _, thought = before.rpartition(THINK)
    if before_thought.strip("\n") or END_THINK in answer or len(texts) < len(parts):
        raise ValueError(
            f"{location}: the reasoning in the content is not one {THINK}...{END_THINK} in front of text; give it as "
            "reasoning_content"
        )
    return thought.strip("\n"), answer.strip("\n")


def _is_medium(part: str | dict[str, Any]) -> bool:
    return not isinstance(part, str) and part["type"] != "text"
