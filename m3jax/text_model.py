"""A checkpoint as one object: text in, text out."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array

from m3jax.assets import embedded_path
from m3jax.completion import Defaults, StoppableText, marked, read_media, stream_text, with_placeholders
from m3jax.config import M3Config
from m3jax.decoding import Drafter, Engine, Generation, Media, Params, Sampling, check_logits, engine_for
from m3jax.decoding.engine import DRAFT_TOKENS
from m3jax.decoding.sampling import SamplingKnobs, as_sampling, as_samplings
from m3jax.dialogue import Reply, chat
from m3jax.files import current_file
from m3jax.hub import M3, load, save
from m3jax.messages import shown
from m3jax.text import ChatTemplate, Event, Tokenizer

NEW_TOKENS = 128  # of a prompt, where neither the caller nor the folder says how many


def params_of(
    defaults: Defaults,
    config: M3Config,
    max_new_tokens: int | None,
    sampling: Sampling,
    ignore_eos: bool = False,
    **settings: int,
) -> Params:
    """Return the settings of a continuation; what the caller gives wins over the folder's generation_config.json.

    Args:
      defaults: of the folder.
      config: of the model, whose EOS ids end a continuation where the folder names none.
      max_new_tokens: None for the folder's, or else `NEW_TOKENS`.
      sampling: how tokens are drawn, the folder's defaults included.
      ignore_eos: no EOS id ends it, neither the folder's nor the configuration's.
      **settings: other attributes of `Params`: min_tokens, top_logprobs.
    """
    eos_ids = config.eos_token_id if defaults.stop_ids is None else defaults.stop_ids
    limits = (max_new_tokens, defaults.max_new_tokens, NEW_TOKENS)
    return Params(
        max_new_tokens=next(limit for limit in limits if limit is not None),
        sampling=sampling,
        stop_ids=() if ignore_eos else eos_ids,
        **settings,
    )


@dataclass(frozen=True)
class TextModel:
    """A model with its tokenizer, its chat template and its defaults.

    Attributes:
      model: the parameters, and how they are computed.
      tokenizer: the checkpoint's.
      defaults: its generation_config.json.
      template: its chat_template.jinja as text; None where the folder has none. A prompt is not put into it.
      folder: where it was read from.

    Example:
      lm = m3jax.TextModel.from_pretrained()
      print(lm.generate("def __enter__(self):\\n    return", max_new_tokens=12, temperature=0))
    """

    model: M3
    tokenizer: Tokenizer
    defaults: Defaults
    template: str | None
    folder: Path

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path | None = None,
        *,
        dtype: DTypeLike = "bfloat16",
        mesh: Mesh | str | None = None,
        backend: str = "auto",
        progress: bool = True,
        weights: str = "dequantize",
    ) -> "TextModel":
        """Read all of a folder in the hub's layout.

        Args:
          folder: None is the embedded checkpoint.
          dtype, mesh, progress, weights: as in `m3jax.load`.
          backend: as in `M3.with_backend`.

        Raises:
          ValueError: a folder that cannot be used; it says what is wrong and where. What is small is read first.
        """
        folder = embedded_path() if folder is None else Path(folder)
        M3Config.from_pretrained(folder)
        tokenizer, defaults = Tokenizer.from_pretrained(folder), Defaults.from_pretrained(folder)
        template_file = current_file(folder, "chat_template.jinja")
        template = ChatTemplate.read_source(template_file) if template_file.is_file() else None
        model = load(folder, dtype=dtype, mesh=mesh, progress=progress, weights=weights).with_backend(backend)
        return cls(model, tokenizer, defaults, template, folder)

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_new_tokens: int | None = None,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: str | Sequence[str] = (),
        stream: bool = False,
        draft: Drafter | str | Path | None = None,
        draft_tokens: int = DRAFT_TOKENS,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        **knobs: Unpack[SamplingKnobs],
    ) -> str | list[str] | Iterator[str] | Iterator[tuple[int, str]]:
        """Continue one text, or several.

        A prompt is what the model sees and no more, as on the command line: no BOS and no template is added; special
        tokens that are written in it are those tokens. With the same seed the same text comes as from
        `python -m m3jax.generate`.

        Args:
          prompts: a text, or several.
          max_new_tokens: of each; None for the folder's default, or else 128.
          sampling: how tokens are drawn, one for all or one a prompt; None is by the keywords.
          stop: a text, or several, before which a continuation ends.
          stream: give the text as it comes.
          draft: as in `m3jax.generate`.
          draft_tokens: as in `m3jax.generate`.
          images: that every prompt shows, one at each `<image>` of a prompt, or in front where it says that nowhere; as
            on the command line. What an image can be is said in `m3jax.generate`.
          videos: the same, one at each `<video>`.
          **knobs: the attributes of `Sampling`, in place of one: temperature (0 is greedy), top_k, top_p, min_p,
            repetition_penalty, presence_penalty, frequency_penalty, logit_bias, bad_words, seed. What is not given, or
            None, is the folder's default, or else off. The seed can be one a prompt.

        Returns:
          The new text of one prompt, or a list of one a prompt. With `stream` an iterator of pieces, of several prompts
          as (number of the prompt from 0, piece).

        Raises:
          TypeError: an unknown keyword.
          ValueError: a bad argument, or a prompt that is no text or does not fit.
          FloatingPointError: the model's logits were NaN or infinite.
        """
        texts = _as_texts(prompts)
        samplings = as_samplings(len(texts), sampling, knobs, called=self.generate, defaults=self.defaults.knobs)
        config = self.model.config
        params = [params_of(self.defaults, config, max_new_tokens, of_prompt) for of_prompt in samplings]
        stop = [stop] if isinstance(stop, str) else list(stop)
        media = None
        if images or videos:
            if self.model.vision is None:
                raise ValueError("the model has no vision tower: it takes text alone; leave images and videos out")
            media = read_media(images, videos)
            texts = [marked(text, media) for text in texts]
        tokens = [tuple(self.tokenizer.encode(text)) for text in texts]
        if media is not None:
            tokens = [tuple(with_placeholders(prompt, media, self.tokenizer)) for prompt in tokens]
        new_texts = [StoppableText(self.tokenizer.stream(), stop) for _ in texts]
        pieces = self._pieces(tokens, params, media, new_texts, draft, draft_tokens)
        if stream:
            return (piece for _, piece in pieces) if isinstance(prompts, str) else pieces
        for _ in pieces:
            pass
        return new_texts[0].text if isinstance(prompts, str) else [new_text.text for new_text in new_texts]

    def _pieces(
        self,
        prompts: list[tuple[int, ...]],
        params: list[Params],
        media: Media | None,
        new_texts: list[StoppableText],
        draft: Drafter | str | Path | None,
        draft_tokens: int,
    ) -> Iterator[tuple[int, str]]:
        """The pieces of all continuations as they come, each with the number of its prompt."""
        engine = engine_for(self.model, prompts, params, media=[media], draft=draft, draft_tokens=draft_tokens)
        handles = [engine.add(prompt, asked, media) for prompt, asked in zip(prompts, params, strict=True)]
        number_of = {handle: number for number, handle in enumerate(handles)}
        results: dict[int, Generation] = {}
        for handle, piece, result in stream_text(engine, dict(zip(handles, new_texts, strict=True))):
            if piece:
                yield number_of[handle], piece
            if result is not None:
                results[handle] = result
        check_logits([results[handle] for handle in handles])

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        thinking_mode: str | None = "adaptive",
        stream: bool = True,
        template: ChatTemplate | str | Path | None = None,
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        engine: Engine | None = None,
        draft: Drafter | str | Path | None = None,
        draft_tokens: int = DRAFT_TOKENS,
        **knobs: Unpack[SamplingKnobs],
    ) -> Iterator[Event | Reply] | Reply:
        """Answer the last of some messages, which the folder's chat template makes a prompt of.

        Args:
          messages: of a history, in OpenAI's layout.
          tools: that the model may call, as in `m3jax.chat`: objects with a JSON schema, or Python functions.
          thinking_mode: "enabled", "disabled", or "adaptive", where the model decides.
          stream: give events as they come, else the whole answer.
          template: another chat template than the folder's, or its file.
          max_new_tokens: of the answer; None for the folder's default, or else as in `m3jax.chat`.
          sampling: how tokens are drawn; None is by the keywords.
          stop: a text, or several, before which the answer ends.
          engine: one to run on, with what it has read before; None makes one for this call.
          draft: as in `m3jax.generate`.
          draft_tokens: as in `m3jax.generate`.
          **knobs: as in `generate`.

        Returns:
          As `m3jax.chat`: the answer, or with `stream` an iterator of its events.

        Raises:
          TypeError: an unknown keyword.
          ValueError: a folder without a template, a bad argument, or messages that do not fit.
          FloatingPointError: the model's logits were NaN or infinite.
        """
        sampling = as_sampling(sampling, knobs, called=self.chat, defaults=self.defaults.knobs)
        if template is None and self.template is not None:
            template = ChatTemplate(self.template, f"the chat template of {self.folder}")
        return chat(
            self.model,
            self.tokenizer,
            messages,
            tools=tools,
            thinking_mode=thinking_mode,
            stream=stream,
            template=template,
            max_new_tokens=self.defaults.max_new_tokens if max_new_tokens is None else max_new_tokens,
            sampling=sampling,
            stop=stop,
            stop_at=self.defaults.stop_ids,
            engine=engine,
            draft=draft,
            draft_tokens=draft_tokens,
        )

    def forward(self, text: str) -> dict[str, Array | list]:
        """Run a text through the model once, and keep everything on the way.

        Args:
          text: T tokens of it.

        Returns:
          What `M3.intermediates` returns for a batch of one, with "tokens" [1 T] int32 and "pieces", their texts.

        Raises:
          ValueError: no text, no token, or more than the model's context.
        """
        ids = self.tokenizer.encode(text)
        if not ids:
            raise ValueError("text is empty: give it at least one token")
        tokens = jnp.asarray([ids], jnp.int32)
        pieces = [self.tokenizer.decode([token], skip_special_tokens=False) for token in ids]
        return {"tokens": tokens, "pieces": pieces} | self.model.intermediates(tokens)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model in the hub's layout (`m3jax.save`), with the tokenizer's files and defaults of its folder.

        Args:
          folder: it is made if it is not there.
        """
        save(self.model, folder, copy_from=self.folder)


def _as_texts(prompts: str | Sequence[str]) -> list[str]:
    """Return one text, or several, as a list of texts.

    Raises:
      ValueError: anything else, such as token ids, which `m3jax.generate` continues.
    """
    texts = [prompts] if isinstance(prompts, str) or not isinstance(prompts, Iterable) else list(prompts)
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(
                f"prompts = {shown(prompts)}: must be a text, or a list of texts; "
                "lists of token ids go to m3jax.generate(lm.model, ...)"
            )
    return texts
