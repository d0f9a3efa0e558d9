"""Images and videos of prompts: read, processed, and written into the tokens as the model was trained to see them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from m3jax.decoding import Media
from m3jax.media import (
    LIMITS,
    PlaceholderIds,
    ProcessedImage,
    ProcessedVideo,
    expand_tokens,
    media_source,
    names_file,
    process_image,
    process_video,
)
from m3jax.media.placeholders import IMAGE, VIDEO
from m3jax.messages import printable, shortened, shown
from m3jax.progress import activity
from m3jax.text import Tokenizer


def read_media(images: Iterable[Any] = (), videos: Iterable[Any] = (), *, progress: bool = True) -> Media:
    """Read and process images and videos, as the hub's processor does it.

    Args:
      images: each a path or a data URL as text, a `Path`, bytes, a Pillow image, an array, or a `ProcessedImage`.
      videos: each a path or a data URL as text, a `Path`, bytes, frames, or a `ProcessedVideo`.
      progress: whether to say what is read, and how far a video is (`m3jax.progress`).

    Raises:
      ValueError: one that cannot be used; it says which.
    """
    images, videos = _as_list(images, "images"), _as_list(videos, "videos")
    read = lambda medium, items: [
        read_medium(medium, item, called=f"{medium} {number} of {len(items)}", progress=progress)
        for number, item in enumerate(items, 1)
    ]
    with activity(progress):  # one line for all of them
        return Media(read("image", images), read("video", videos))


def read_medium(
    medium: str, source: Any, *, called: str = "", progress: bool = True, **options: Any
) -> ProcessedImage | ProcessedVideo:
    """Read and process one image or video.

    Args:
      medium: "image" or "video".
      source: as an item of `read_media`.
      called: its name in the line of progress and in errors; a file is named besides.
      progress: as in `read_media`.
      **options: of `m3jax.media.process_image` or `process_video`, for what is not processed yet.

    Raises:
      ValueError: it cannot be used; the message begins with what it is called.
    """
    path = printable(str(source)) if names_file(source) else ""
    processed = ProcessedImage if medium == "image" else ProcessedVideo
    name = ", ".join(filter(None, (called, path)))
    with activity(progress) as line:
        line.say(f"reading {name or medium}")
        watch = lambda done, total: line.say(f"reading {name or medium}: {done / total:.0%} of {total:,} frames")
        try:
            if isinstance(source, processed) and not options:
                return source
            if medium == "image":
                return process_image(media_source(source, LIMITS.image_bytes), **options)
            return process_video(media_source(source), **options, watch=watch)
        except (ValueError, OverflowError) as error:
            # What is wrong with a file itself is said by its name already.
            name = called if path and str(error).startswith((path, shown(path))) else name
            raise ValueError(shortened(f"{name}: {error}" if name else str(error))) from error


def marked(text: str, media: Media) -> str:
    """Return a text with <image> and <video> replaced by the placeholders; without images, or videos, they stay text.

    Args:
      text: of a prompt.
      media: that it shows.
    """
    text = text.replace("<image>", IMAGE) if media.images else text
    return text.replace("<video>", VIDEO) if media.videos else text


def with_placeholders(prompt: Sequence[int], media: Media, tokenizer: Tokenizer | None) -> list[int]:
    """Return a prompt with all tokens that its images and videos fill.

    Args:
      prompt: token ids with one placeholder for each image and each video. Of a kind that has none all stand in front,
        images before videos, behind a BOS where the prompt begins with one.
      media: processed, each kind in the order of its placeholders.
      tokenizer: of the model; it knows the placeholders, and spells time stamps.

    Raises:
      ValueError: more placeholders of a kind than media or fewer, no tokenizer, or one that knows no images.
    """
    if not media:
        return list(prompt)
    if tokenizer is None:
        raise ValueError("images and videos stand between tokens that the tokenizer knows: give tokenizer")
    ids, prompt = PlaceholderIds.of_tokenizer(tokenizer), list(prompt)
    # A prompt marks all places of a kind or none: how many it marks is checked when they are expanded.
    in_front = [] if ids.image in prompt else [ids.image] * len(media.images)
    in_front += [] if ids.video in prompt else [ids.video] * len(media.videos)
    begin = 1 if prompt and prompt[0] == tokenizer.bos_id else 0  # a BOS stays first, as in training
    prompt[begin:begin] = in_front
    return expand_tokens(prompt, media.images, media.videos, encode=tokenizer.encode, ids=ids)


def _as_list(items: Iterable[Any], name: str) -> list[Any]:
    if isinstance(items, str | bytes | Path) or not isinstance(items, Iterable):
        raise ValueError(f"{name} is one {name[:-1]}: give a list of them")
    return list(items)
