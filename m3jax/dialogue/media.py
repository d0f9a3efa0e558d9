"""Images and videos in messages: each is read once, and its placeholders are expanded in the dialogue's tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from m3jax.completion import read_medium, with_placeholders
from m3jax.decoding import Media
from m3jax.media import LIMITS, LONG_SIDE_TIERS, ProcessedImage, ProcessedVideo
from m3jax.messages import printable, shown
from m3jax.progress import activity
from m3jax.text import ChatTemplate, Tokenizer, ordered_messages

# The fields in which a part may have its source; it may also be nested, as in "image_url": {"url": ..., "detail": ...}.
_SOURCES = {"image": ("image", "image_url", "url", "path"), "video": ("video", "video_url", "url", "path")}
_OPTIONS = {"image": ("detail", "max_long_side_pixel"), "video": ("detail", "max_long_side_pixel", "fps")}
_AUTO = "auto"  # the hub's own sizes


def dialogue_tokens(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None,
    thinking_mode: str | None,
    can_see: bool,
    known: dict[Any, Any] | None = None,
    progress: bool = True,
) -> tuple[list[int], Media]:
    """Return the token ids of a dialogue, with the placeholders of its images and videos expanded, and these media.

    Args:
      template: the chat template that renders the messages.
      tokenizer: of the model.
      messages: of a history. A part {"type": "image", "image": source} shows an image, {"type": "video", ...} a video;
        OpenAI's "image_url" and "input_image" do too. A source is as in `m3jax.completion.read_media`.
      tools: that the model may call.
      thinking_mode: as in `ChatTemplate.render`.
      can_see: whether the model has a tower.
      known: images and videos that were read before, by key; new ones are added.
      progress: whether reading is shown.

    Raises:
      ValueError: as `ChatTemplate.encode`; an image or a video that cannot be read, that has no source, or that the
        model cannot see.
    """
    prompt = template.encode(tokenizer, messages, tools=tools, thinking_mode=thinking_mode)
    parts = list(media_parts(ordered_messages(messages)))  # in the order in which the template writes them
    if not parts:
        return prompt, Media()
    known = {} if known is None else known
    with activity(progress):  # one line for all of them
        read: dict[str, list[Any]] = {"image": [], "video": []}
        for part, place in parts:
            try:
                read[part["type"]].append(read_part(part, known, can_see=can_see, progress=progress))
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
    media = Media(read["image"], read["video"])
    return with_placeholders(prompt, media, tokenizer), media


def media_parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield the image and video parts of messages, each with its place in words."""
    for number, message in enumerate(messages, 1):
        content = message["content"]
        for index, part in enumerate(content if isinstance(content, list) else (), 1):
            if not isinstance(part, str) and part["type"] != "text":
                yield part, f"message {number} ({message['role']}), part {index}"


def read_part(
    part: Mapping[str, Any], known: dict[Any, Any], *, can_see: bool, progress: bool = True
) -> ProcessedImage | ProcessedVideo:
    """Return an image or a video of a message, processed; one that was read before is not read again.

    Args:
      part: {"type": "image", "image": source} or {"type": "video", "video": source}, in the spelling of templates.
      known: images and videos that were read before, by key; new ones are added.
      can_see: whether the model has a tower.
      progress: whether reading is shown.

    Raises:
      ValueError: it cannot be read, has no source or an unknown option, or the model cannot see.
    """
    if not can_see:
        raise ValueError("the model has no vision tower: it takes text alone; leave images and videos out")
    key, source, options = what_is_read(part)
    if key not in known:
        state = _file_state(source)
        known[key] = source, state, read_medium(part["type"], source, progress=progress, **options)
    return known[key][2]


def forget_changed(part: Mapping[str, Any], known: dict[Any, Any], messages: Sequence[Mapping[str, Any]]) -> None:
    """Forget a file that has changed since it was read, so that it is read again.

    Args:
      part: as in `read_part`.
      known: as in `read_part`.
      messages: of the dialogue.

    Raises:
      ValueError: it has changed, and a message shows it as it was.
    """
    key, source, _ = what_is_read(part)
    if key not in known or known[key][1] == _file_state(source):
        return
    if any(what_is_read(other)[0] == key for other, _ in media_parts(ordered_messages(messages))):
        raise ValueError(
            f"{printable(str(source))} has changed, and this dialogue shows it as it was: give the new one another name"
        )
    del known[key]


def _file_state(source: Any) -> tuple[int, int] | None:
    """Return the modification time and the size of a file; None if the source is not the path of one."""
    try:
        state = Path(source).stat() if isinstance(source, str | Path) else None
    except (OSError, ValueError):
        return None
    return None if state is None else (state.st_mtime_ns, state.st_size)


def what_is_read(part: Mapping[str, Any]) -> tuple[tuple[Any, ...], Any, dict[str, Any]]:
    """Return the key under which a part is remembered, its source, and the options of its processing.

    Raises:
      ValueError: no source or several, or an unknown option.
    """
    medium, fields = part["type"], {name: value for name, value in part.items() if name != "type" and value is not None}
    for name in _SOURCES[medium]:
        if isinstance(fields.get(name), Mapping):
            fields |= fields.pop(name)
    sources = [name for name in _SOURCES[medium] if name in fields]
    if len(sources) != 1:
        raise ValueError(
            f"{medium} has {len(sources)} sources: give one, as in {{'type': '{medium}', '{medium}': path}}"
        )
    source = fields.pop(sources[0])
    if unknown := [name for name in fields if name not in _OPTIONS[medium]]:
        raise ValueError(f"{shown(unknown[0])} is not supported: only {', '.join(_OPTIONS[medium])}")
    options = _options(fields)
    # An array or an image is known by its id; `known` keeps a reference to it, so that no other object gets that id.
    name = source if isinstance(source, str | bytes | Path) else id(source)
    return (medium, name, *sorted(options.items())), source, options


def _options(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the processing options that a part asks for: the longest side in pixels, and frames per second."""
    detail = fields.get("detail", _AUTO)
    if detail not in (*LONG_SIDE_TIERS, _AUTO):
        raise ValueError(f"detail = {shown(detail)}: must be auto, {', '.join(LONG_SIDE_TIERS)}")
    options = {} if detail == _AUTO else {"max_long_side": LONG_SIDE_TIERS[detail]}
    for name, option, kinds in (("max_long_side_pixel", "max_long_side", int), ("fps", "fps", int | float)):
        if name in fields:
            if not isinstance(fields[name], kinds) or isinstance(fields[name], bool):
                raise ValueError(f"{name} = {shown(fields[name])}: must be a number")
            options[option] = fields[name]
    if "fps" in options and not LIMITS.fewest_fps <= options["fps"] <= LIMITS.most_fps:
        raise ValueError(f"fps = {options['fps']:g}: must be from {LIMITS.fewest_fps:g} to {LIMITS.most_fps:g}")
    return options
