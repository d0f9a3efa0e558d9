"""Images and videos of prompts: read, processed, and written into the tokens as the model was trained to see them."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from m3jax.decoding.engine import Media
from m3jax.media import (
    LIMITS,
    PlaceholderIds,
    ProcessedImage,
    ProcessedVideo,
    expand_tokens,
    media_source,
    process_image,
    process_video,
)
from m3jax.media.placeholders import IMAGE, VIDEO
from m3jax.messages import printable, shortened
from m3jax.progress import activity
from m3jax.text import Tokenizer


def read_media(images: Iterable[Any] = (), videos: Iterable[Any] = (), *, progress: bool = True) -> Media:
    """Read and process images and videos, as the hub's processor does it.

    Args:
      images: each a path or a data URL as text, a `Path`, bytes, a Pillow image, an array, or a `ProcessedImage`.
      videos: each a path or a data URL as text, a `Path`, bytes, frames, or a `ProcessedVideo`.
      progress: whether to say what is read (`m3jax.progress`).

    Raises:
      ValueError: one that cannot be used; it says which.
    """
    images, videos = _as_list(images, "images"), _as_list(videos, "videos")
    with activity(progress) as line:
        read = lambda items, name, read_one: [
            _named(item, f"{name} {number}", len(items), read_one, line.say) for number, item in enumerate(items, 1)
        ]
        return Media(read(images, "image", _image), read(videos, "video", _video))


def marked(text: str, media: Media) -> str:
    """A text in which <image> and <video> are the placeholders; without images, or videos, they stay text.

    Args:
      text: of a prompt.
      media: that it shows.
    """
    text = text.replace("<image>", IMAGE) if media.images else text
    return text.replace("<video>", VIDEO) if media.videos else text


def with_placeholders(prompt: Sequence[int], media: Media, tokenizer: Tokenizer | None) -> list[int]:
    """A prompt with all tokens that its images and videos fill.

    Args:
      prompt: token ids with one placeholder for each image and each video. Of a kind that has none all stand in front,
        images before videos, behind a BOS where the prompt begins with one.
      media: processed, each kind in the order of its placeholders.
      tokenizer: of the model; it knows the placeholders, and spells time stamps.

    Raises:
      ValueError: more placeholders of a kind than media or fewer, no tokenizer, or one that knows no images.
    """
    if not media.images and not media.videos:
        return list(prompt)
    if tokenizer is None:
        raise ValueError("images and videos stand between tokens that the tokenizer knows: give tokenizer")
    ids, prompt = PlaceholderIds.of_tokenizer(tokenizer), list(prompt)
    in_front = [] if ids.image in prompt else [ids.image] * len(media.images)
    in_front += [] if ids.video in prompt else [ids.video] * len(media.videos)
    begin = 1 if prompt and prompt[0] == tokenizer.bos_id else 0
    prompt[begin:begin] = in_front
    return expand_tokens(prompt, media.images, media.videos, encode=tokenizer.encode, ids=ids)


def _as_list(items: Iterable[Any], name: str) -> list[Any]:
    if isinstance(items, str | bytes | Path) or not isinstance(items, Iterable):
        raise ValueError(f"{name} is one {name[:-1]}: give a list of them")
    return list(items)


def _named(
    item: Any, name: str, count: int, read_one: Callable[[Any], Any], say: Callable[[str], None]
) -> ProcessedImage | ProcessedVideo:
    """One image or video, by whose number or file an error begins."""
    is_file = isinstance(item, Path) or (isinstance(item, str) and item[:5].lower() != "data:")
    name = f"{name} of {count}" if not is_file else f"{name} of {count}, {printable(str(item))}"
    say(f"reading {name}")
    try:
        return read_one(item)
    except ValueError as error:
        raise ValueError(shortened(f"{name}: {error}")) from error


def _image(item: Any) -> ProcessedImage:
    return item if isinstance(item, ProcessedImage) else process_image(media_source(item, LIMITS.image_bytes))


def _video(item: Any) -> ProcessedVideo:
    return item if isinstance(item, ProcessedVideo) else process_video(media_source(item))
