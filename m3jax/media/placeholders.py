"""Prompts with images and videos: one placeholder each becomes as many as the model has features for it."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import index
from typing import Any, NamedTuple, SupportsIndex

from m3jax.config import M3Config
from m3jax.media.process import ProcessedImage, ProcessedVideo
from m3jax.messages import shown

IMAGE, VIDEO = "]<]image[>[", "]<]video[>["
START, END = "]<]start of image[>[", "]<]end of image[>["  # around each image, and around each pair of a video's frames


class PlaceholderIds(NamedTuple):
    """Token ids of the four strings; the defaults are those of M3's tokenizer."""

    image: int = 200025
    video: int = 200026
    start: int = 200029
    end: int = 200030

    @classmethod
    def of_config(cls, config: M3Config) -> "PlaceholderIds":
        """The ids that a configuration gives images and videos; start and end, which it does not have, are M3's.

        Args:
          config: of a model; `image_token_index` and `video_token_index` where its file has them.

        Raises:
          ValueError: one of them is no token of the vocabulary.
        """
        ids = {}
        for medium in ("image", "video"):
            if (token := config.extra.get(f"{medium}_token_index")) is not None:
                if not isinstance(token, int) or not 0 <= token < config.vocab_size:
                    raise ValueError(
                        f"{medium}_token_index = {shown(token)}: outside the vocabulary of {config.vocab_size}"
                    )
                ids[medium] = token
        return cls(**ids)

    @classmethod
    def of_tokenizer(cls, tokenizer: Any) -> "PlaceholderIds":
        """The ids that a tokenizer gives the four strings.

        Args:
          tokenizer: an `m3jax.Tokenizer`.

        Raises:
          ValueError: its vocabulary lacks one of them.
        """
        ids = {text: tokenizer.backend.token_to_id(text) for text in (IMAGE, VIDEO, START, END)}
        if missing := [text for text, token_id in ids.items() if token_id is None]:
            raise ValueError(f"the tokenizer has no token {missing[0]}: it knows no images and videos")
        return cls(*ids.values())


def image_pieces(image: ProcessedImage) -> list[str]:
    """Return the pieces of text that stand for an image: a start, a placeholder for each feature, an end."""
    return [START, *[IMAGE] * image.tokens, END]


def video_pieces(video: ProcessedVideo) -> list[str]:
    """Return the pieces of text that stand for a video: for each pair of frames a time, a start, placeholders, an end.

    Start and end are those of images, and the placeholders between them are a video's. The time is text and no special
    token; it is left out where the video has none.
    """
    features, pieces = video.tokens // video.temporal_patches, []
    for pair in range(video.temporal_patches):
        if video.timestamps is not None:
            pieces.append(f"]<]{video.timestamps[pair]:.1f} seconds[>[")
        pieces += [START, *[VIDEO] * features, END]
    return pieces


def expand_text(text: str, images: Sequence[ProcessedImage] = (), videos: Sequence[ProcessedVideo] = ()) -> str:
    """A prompt in which each placeholder is written out, the first image for the first `]<]image[>[`, and so on.

    Args:
      text: what the chat template made: `]<]image[>[` or `]<]video[>[` once for each, at its place.
      images, videos: each kind in the order of its placeholders.

    Returns:
      The text to tokenize.

    Raises:
      ValueError: more placeholders of a kind than images or videos, or fewer.

    Source: transformers `MiniMaxM3VLProcessor`.
    """
    parts = re.split(f"({re.escape(IMAGE)}|{re.escape(VIDEO)})", text)
    _check_counts(parts.count(IMAGE), parts.count(VIDEO), images, videos)
    pieces = {IMAGE: map(image_pieces, images), VIDEO: map(video_pieces, videos)}
    return "".join("".join(next(pieces[part])) if part in pieces else part for part in parts)


def expand_tokens(
    tokens: Iterable[SupportsIndex],
    images: Sequence[ProcessedImage] = (),
    videos: Sequence[ProcessedVideo] = (),
    *,
    encode: Callable[[str], Sequence[int]] | None = None,
    ids: PlaceholderIds | None = None,
) -> list[int]:
    """`expand_text` on a prompt that is token ids already, as vLLM does it.

    A time stamp is tokenized by itself. In `expand_text` its first `]` may become one token with what stands before it.

    Args:
      tokens: ids with one placeholder for each image and video.
      images, videos: each kind in the order of its placeholders.
      encode: text to ids, for time stamps; needed where a video has them.
      ids: of the placeholders; None is M3's.

    Returns:
      The ids with all placeholders.

    Raises:
      ValueError: as `expand_text`, or time stamps and no `encode`.
    """
    ids = ids or PlaceholderIds()
    tokens = [index(token) for token in tokens]
    _check_counts(tokens.count(ids.image), tokens.count(ids.video), images, videos)
    if encode is None and any(video.timestamps is not None for video in videos):
        raise ValueError("a video has time stamps, which are text: give encode, the tokenizer's")
    written = {IMAGE: [ids.image], VIDEO: [ids.video], START: [ids.start], END: [ids.end]}
    pieces = {ids.image: map(image_pieces, images), ids.video: map(video_pieces, videos)}

    def expanded() -> Iterator[int]:
        for token in tokens:
            for piece in next(pieces[token]) if token in pieces else ():
                yield from written[piece] if piece in written else encode(piece)
            if token not in pieces:
                yield token

    return list(expanded())


def _check_counts(
    image_places: int, video_places: int, images: Sequence[ProcessedImage], videos: Sequence[ProcessedVideo]
) -> None:
    """Raise ValueError where placeholders and media are not equally many."""
    for medium, places, given in (("image", image_places, images), ("video", video_places, videos)):
        if places != len(given):
            raise ValueError(
                f"the prompt has {places} {medium} placeholders for {len(given)} {medium}s: write one {shown(IMAGE)} "
                f"or {shown(VIDEO)} where each belongs"
            )
