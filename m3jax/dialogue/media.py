"""Images and videos of messages: found in their parts, read once, and written into the dialogue's tokens."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from m3jax.decoding import Media, read_media, with_placeholders
from m3jax.media import LONG_SIDE_TIERS, media_source, process_image, process_video
from m3jax.messages import shown
from m3jax.text import ChatTemplate, Tokenizer, ordered_messages

# Where a part of each kind may have its source. As in "image_url": {"url": ..., "detail": ...} it may stand one deeper.
_SOURCES = {"image": ("image", "image_url", "url", "path"), "video": ("video", "video_url", "url", "path")}
_OPTIONS = {"image": ("detail", "max_long_side_pixel"), "video": ("detail", "max_long_side_pixel", "fps")}
_AUTO = "auto"  # the hub's own sizes


def dialogue_tokens(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    thinking_mode: str | None,
    can_see: bool,
    known: dict[Any, Any] | None = None,
    progress: bool = True,
) -> tuple[list[int], Media]:
    """The token ids of a dialogue with all that its images and videos fill, and these.

    Args:
      template: how messages become text.
      tokenizer: of the model.
      messages: of a history. A part {"type": "image", "image": source} shows an image, {"type": "video", ...} a video;
        OpenAI's "image_url" and "input_image" do too. A source is as in `m3jax.decoding.read_media`.
      tools: that the model may call.
      thinking_mode: as in `ChatTemplate.render`.
      can_see: whether the model has a tower.
      known: what was read before, by its source; what is read is added.
      progress: whether reading is shown.

    Raises:
      ValueError: as `ChatTemplate.encode`; an image or a video that cannot be read, that has no source, or that the
        model cannot see.
    """
    prompt = template.encode(tokenizer, messages, tools=tools, thinking_mode=thinking_mode)
    found = {"image": [], "video": []}
    for part, place in _parts(ordered_messages(messages)):  # in the order in which the template writes them
        found[part["type"]].append((part, place))
    if not any(found.values()):
        return prompt, Media()
    if not can_see:
        _, place = (found["image"] or found["video"])[0]
        raise ValueError(f"{place}: the model has no vision tower: it takes text alone; leave images and videos out")
    known = {} if known is None else known
    media = Media(
        *([_seen(part, place, known, progress) for part, place in found[kind]] for kind in ("image", "video"))
    )
    return with_placeholders(prompt, media, tokenizer), media


def _parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The parts that are no text, and where they stand."""
    for number, message in enumerate(messages, 1):
        content = message["content"]
        for place, part in enumerate(content if isinstance(content, list) else (), 1):
            if not isinstance(part, str) and part["type"] != "text":
                yield part, f"message {number} ({message['role']}), part {place}"


def _seen(part: Mapping[str, Any], place: str, known: dict[Any, Any], progress: bool) -> Any:
    """An image or a video, processed; one that was read before is not read again."""
    kind, fields = part["type"], {name: value for name, value in part.items() if name != "type" and value is not None}
    for name in _SOURCES[kind]:
        if isinstance(fields.get(name), Mapping):
            fields |= fields.pop(name)
    sources = [name for name in _SOURCES[kind] if name in fields]
    if len(sources) != 1:
        raise ValueError(
            f"{place}: {kind} has {len(sources)} sources: give one, as in {{'type': '{kind}', '{kind}': path}}"
        )
    source = fields.pop(sources[0])
    if unknown := [name for name in fields if name not in _OPTIONS[kind]]:
        raise ValueError(f"{place}: {shown(unknown[0])} is not supported: only {', '.join(_OPTIONS[kind])}")
    # An object is told by its address, and kept with what became of it, so that no other one gets that address.
    key = (kind, source if isinstance(source, str | bytes | Path) else id(source), *sorted(fields.items()))
    if key not in known:
        try:
            known[key] = source, _processed(kind, source, fields, progress)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
    return known[key][1]


def _processed(kind: str, source: Any, options: Mapping[str, Any], progress: bool) -> Any:
    """An image or a video at the size, and the frames of it, that a part asks for."""
    given = {"max_long_side": options["max_long_side_pixel"]} if "max_long_side_pixel" in options else {}
    detail = options.get("detail", _AUTO)
    if detail not in (*LONG_SIDE_TIERS, _AUTO):
        raise ValueError(f"detail = {shown(detail)}: must be auto, {', '.join(LONG_SIDE_TIERS)}")
    if detail != _AUTO and not given:
        given["max_long_side"] = LONG_SIDE_TIERS[detail]
    if "fps" in options:
        given["fps"] = options["fps"]
    if not given:
        return getattr(read_media(**{f"{kind}s": [source]}, progress=progress), f"{kind}s")[0]
    process = process_image if kind == "image" else process_video
    return process(media_source(source), **given)
