"""Messages to what a worker takes: token ids, patches, and the places of both."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from m3jax.dialogue.chat import check_question
from m3jax.dialogue.media import media_parts, what_is_read
from m3jax.media import PlaceholderIds, ProcessedImage, ProcessedVideo, expand_tokens
from m3jax.serve.gateway.errors import refused
from m3jax.serve.gateway.pixels import PixelPool
from m3jax.serve.gateway.sources import Sources
from m3jax.text import ChatTemplate, Tokenizer, ordered_messages

MOST = {"image": 200, "video": 20}  # of one request, as the hosted API has it


@dataclass(frozen=True)
class Medium:
    """An image or a video that was processed.

    Attributes:
      kind: "image" or "video".
      processed: as the model takes it.
      digest: of its patches, in hexadecimal.
    """

    kind: str
    processed: ProcessedImage | ProcessedVideo
    digest: str


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as a worker takes it.

    Attributes:
      ids: token ids, placeholders expanded.
      media: batches of patches with their places: images, then videos; none for text.
    """

    ids: Sequence[int]
    media: Sequence[pb.MultimodalInputs] = ()

    def set_in(self, request: pb.GenerateRequest) -> None:
        """Write the prompt into a request."""
        request.tokenized.input_ids.extend(self.ids)
        for number, batch in enumerate(self.media):
            target = request.mm_inputs if number == 0 else request.extra_mm_inputs.add()
            target.CopyFrom(batch)


class Renderer:
    """All that makes prompts of messages.

    Args:
      tokenizer: of the model.
      template: its chat template.
      pool: that processes media.
      sources: that may be read.
      can_see: True if the model has a vision tower.
      context: tokens of the longest prompt; a text that must have more is refused before it is tokenized.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        pool: PixelPool,
        sources: Sources,
        can_see: bool,
        context: int,
    ):
        self.tokenizer, self.template, self._context = tokenizer, template, context
        self._pool, self._sources, self._can_see = pool, sources, can_see
        self._ids = PlaceholderIds.of_tokenizer(tokenizer) if can_see else None

    async def render(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None,
        thinking_mode: str | None,
        is_question: bool = True,
    ) -> EncodedPrompt:
        """Return the prompt of a conversation.

        Args:
          messages: in OpenAI's layout, with media by their sources.
          tools: that the prompt shows.
          thinking_mode: of the template.
          is_question: refuse a conversation that asks nothing.

        Raises:
          ApiError: a conversation that cannot be rendered; it names messages or tools.
        """
        # Templates and tokenizers of long conversations take a while, and the event loop goes on meanwhile.
        ids = await asyncio.to_thread(self._encode, messages, tools, thinking_mode, is_question)
        media = await self._media(ordered_messages(messages))
        if not media:
            return EncodedPrompt(ids)
        try:
            return await asyncio.to_thread(self._expanded, ids, media)
        except ValueError as error:
            raise refused("messages", str(error)) from None

    def _encode(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None,
        thinking_mode: str | None,
        is_question: bool,
    ) -> list[int]:
        try:
            if is_question:
                check_question(messages)
            text = self.template.render(messages, tools, thinking_mode)
            check_length(self.tokenizer, text, "messages", self._context)
            return self.template.encode_rendered(self.tokenizer, text)
        except ValueError as error:
            field = "tools" if str(error).startswith(("tool ", "tools ", "two tools")) else "messages"
            raise refused(field, str(error)) from None

    async def _media(self, messages: Sequence[Mapping[str, Any]]) -> list[Medium]:
        """Return the images and videos of messages, read and processed, in their order."""
        parts = list(media_parts(messages))
        if parts and not self._can_see:
            raise refused("messages", f"{parts[0][1]}: the model has no vision tower: it takes text alone")
        for kind, most in MOST.items():
            if (count := sum(part["type"] == kind for part, _ in parts)) > most:
                raise refused("messages", f"the messages show {count} {kind}s: at most {most}")
        read = [asyncio.create_task(self._medium(part, place)) for part, place in parts]
        try:
            return list(await asyncio.gather(*read))
        finally:
            for task in read:
                task.cancel()

    async def _medium(self, part: Mapping[str, Any], place: str) -> Medium:
        try:
            _, source, options = what_is_read(part)
            data = await self._sources.read(part["type"], source)
            processed, digest = await self._pool.process(part["type"], data, options)
        except ValueError as error:
            raise refused("messages", f"{place}: {error}") from None
        return Medium(part["type"], processed, digest)

    def _expanded(self, ids: Sequence[int], media: Sequence[Medium]) -> EncodedPrompt:
        """Return a prompt whose placeholders are written out, with the places and patches of all media."""
        of_kind = {kind: [each for each in media if each.kind == kind] for kind in MOST}
        expand_tokens(  # only to see that all of them have their places
            ids, [each.processed for each in of_kind["image"]], [each.processed for each in of_kind["video"]],
            encode=self.tokenizer.encode, ids=self._ids,
        )  # fmt: skip
        kinds = {self._ids.image: "image", self._ids.video: "video"}
        waiting = {kind: iter(items) for kind, items in of_kind.items()}
        places: dict[str, list[tuple[int, int]]] = {kind: [] for kind in MOST}
        expanded: list[int] = []
        for token in ids:
            if (kind := kinds.get(token)) is None:
                expanded.append(token)
                continue
            item = next(waiting[kind]).processed
            of_each = ([item], []) if kind == "image" else ([], [item])
            span = expand_tokens([token], *of_each, encode=self.tokenizer.encode, ids=self._ids)
            places[kind].append((len(expanded), len(span)))
            expanded += span
        batches = [
            media_batch(kind, items, places[kind], self._ids.image if kind == "image" else self._ids.video)
            for kind, items in of_kind.items()
            if items
        ]
        return EncodedPrompt(expanded, batches)


def media_batch(
    kind: str, media: Sequence[Medium], places: Sequence[tuple[int, int]], token_id: int
) -> pb.MultimodalInputs:
    """Return media of one kind in the protocol.

    Args:
      kind: "image" or "video".
      media: of that kind.
      places: the first token and the number of tokens that each fills in the prompt, marks and time stamps included.
      token_id: of the placeholders, where features go.

    Returns:
      Patches float32 [X 1176] of all, grids int64 [N 3] (a video's in one row, not cut into chunks), and how many
      patches each has, int64 [N].
    """
    patches = np.concatenate([each.processed.patches for each in media])  # [X 1176]
    grids = [_whole_grid(each.processed.grid) for each in media]
    counts = [len(each.processed.patches) for each in media]
    grid_name, count_name = f"{kind}_grid_thw", f"patches_per_{kind}"
    batch = pb.MultimodalInputs(
        pixel_values=_tensor(patches.astype("<f4", copy=False), "float32"),
        im_token_id=token_id,
        mm_placeholders=[pb.PlaceholderRange(offset=offset, length=length) for offset, length in places],
        mm_hashes=[each.digest for each in media],
        batched_keys=[grid_name, count_name],
        flat_keys={"pixel_values": count_name},
        keep_on_cpu_keys=[grid_name],
        modality=common_pb2.IMAGE if kind == "image" else common_pb2.VIDEO,
    )
    batch.model_specific_tensors[grid_name].CopyFrom(_tensor(np.array(grids, "<i8"), "int64"))
    batch.model_specific_tensors[count_name].CopyFrom(_tensor(np.array(counts, "<i8"), "int64"))
    return batch


def _whole_grid(grid: Sequence[Any]) -> tuple[int, int, int]:
    """Return an image's grid, or that of all chunks of a video together."""
    if isinstance(grid[0], int):
        return tuple(grid)
    return sum(t for t, _, _ in grid), grid[0][1], grid[0][2]


def _tensor(array: np.ndarray, dtype: str) -> pb.TensorData:
    return pb.TensorData(shape=array.shape, dtype=dtype, inline=array.tobytes())


def check_length(tokenizer: Tokenizer, text: str, field: str, context: int) -> None:
    """Refuse a text that has too many tokens in any case, before minutes are spent on counting them.

    Args:
      tokenizer: of the model.
      text: of a prompt.
      field: of the request, for the error.
      context: of the model.

    Raises:
      ApiError: it cannot fit.
    """
    fewest = tokenizer.fewest_tokens(text)
    if fewest > context:
        raise refused(
            field, f"the prompt has more than {fewest} tokens, and the model's context is {context}: shorten it",
            "context_length_exceeded",
        )  # fmt: skip


def tokens_of(tokenizer: Tokenizer, value: Any, field: str, vocab_size: int, context: int) -> list[list[int]]:
    """Return the prompts of a completion: a text, token ids, or a list of either.

    Args:
      tokenizer: of the model.
      value: of the request.
      field: its name.
      vocab_size: ids are below it.
      context: of the model, for texts.

    Raises:
      ApiError: none of these, a text that cannot fit, none at all, or an id that the model does not have.
    """
    is_id = lambda token: isinstance(token, int) and not isinstance(token, bool)
    prompts = [value] if isinstance(value, str) else value
    if isinstance(prompts, list) and prompts and all(map(is_id, prompts)):
        prompts = [prompts]
    if not isinstance(prompts, list) or not prompts:
        raise refused(field, f"{field}: must be a text, a list of token ids, or a list of such, and not empty")
    found = []
    for prompt in prompts:
        if isinstance(prompt, str):
            check_length(tokenizer, prompt, field, context)
            try:
                prompt = tokenizer.encode(prompt)
            except ValueError as error:
                raise refused(field, f"{field}: {error}") from None
        elif not isinstance(prompt, list) or not all(is_id(token) and 0 <= token < vocab_size for token in prompt):
            raise refused(field, f"{field}: token ids are integers from 0 to {vocab_size - 1}, and a prompt is a list")
        if not prompt:
            raise refused(field, f"{field}: a prompt has no tokens; give it at least one")
        found.append(prompt)
    return found
