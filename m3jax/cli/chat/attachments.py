"""Images and videos in a chat: commands name their files, and the next message shows them."""

import os
from typing import Any

from m3jax.assets import sample_picture_path
from m3jax.dialogue import Dialogue
from m3jax.media import ProcessedImage, is_moving, media_source, names_file
from m3jax.media.sizes import PATCH
from m3jax.messages import counted, printable

KINDS = {"/image": "image", "/video": "video"}


class Attachments:
    """The images and videos that the next message shows, in front of its text.

    Args:
      dialogue: reads each file as soon as it is named, so that a bad one is refused before the message is written.
    """

    def __init__(self, dialogue: Dialogue):
        self._dialogue = dialogue
        self._parts: list[dict[str, str]] = []
        self._names: list[str] = []

    @property
    def names(self) -> tuple[str, ...]:
        """The kind and file of each image or video, as the user named it."""
        return tuple(self._names)

    def add_sample(self) -> str:
        """Add the picture that comes with the package; return the line about it."""
        return self._add("image", str(sample_picture_path()), sample_picture_path().name)

    def add(self, command: str, argument: str) -> str:
        """Add a file to those that the next message shows.

        Args:
          command: of `KINDS`.
          argument: the text after it: the name of a file, with or without quotes around it.

        Returns:
          A line with the file's size as the model sees it, and the number of tokens that it fills.

        Raises:
          ValueError: no name, or a file that cannot be shown.
        """
        medium, name = KINDS[command], argument.strip()
        if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'":
            name = name[1:-1]  # terminals put quotes around a file that is dropped on them
        if not name:
            raise ValueError(f"{command} needs the name of {'an' if medium == 'image' else 'a'} {medium} file")
        # The absolute path, so that a saved dialogue can be read from another folder.
        is_path = names_file(name)
        return self._add(
            medium, os.path.abspath(os.path.expanduser(name)) if is_path else name, name if is_path else ""
        )

    def _add(self, medium: str, source: str, called: str) -> str:
        """Add an image or a video from its path or data URL, and return the line about it."""
        part = {"type": medium, medium: source}
        processed = self._dialogue.read(part)
        self._parts.append(part)
        self._names.append(f"{medium} {called}" if called else medium)
        height, width = (PATCH * side for side in (processed.grid if medium == "image" else processed.grid[0])[1:])
        size = f"{height} x {width} pixels (H x W)"
        if not isinstance(processed, ProcessedImage):
            size = f"{counted(len(processed.frame_indices), 'frame')} of {size}"
        if medium == "image" and is_moving(media_source(source)):
            size = f"first frame alone (/video shows all of a GIF), {size}"
        return f"{printable(self._names[-1])}: {size}, {counted(processed.tokens, 'token')}; your next message shows it"

    def drop(self) -> str | None:
        """Remove the file that was added last and return its kind and name; None if there is none."""
        if not self._parts:
            return None
        del self._parts[-1]
        return self._names.pop()

    def message(self, text: str) -> dict[str, Any]:
        """Return the user's message: the images and videos, then the text."""
        content = [*self._parts, {"type": "text", "text": text}] if self._parts else text
        return {"role": "user", "content": content}

    def clear(self) -> None:
        """Remove all files, because a message that shows them is in the dialogue now."""
        self._parts, self._names = [], []
