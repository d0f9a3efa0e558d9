"""The function `generate`, which continues a few prompts of token ids, with images and videos if they show any."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from m3jax.completion.media import read_media, with_placeholders
from m3jax.decoding import Drafter, Generation, Media, Params, Sampling, check_logits, engine_for
from m3jax.decoding.engine import DRAFT_TOKENS, as_prompts
from m3jax.decoding.protocols import TargetModel, sees
from m3jax.decoding.sampling import HostOrDevice, SamplingKnobs, as_samplings
from m3jax.progress import activity
from m3jax.text import Tokenizer


def generate(
    model: TargetModel,
    prompts: Sequence[Sequence[int] | HostOrDevice],
    *,
    max_new_tokens: int,
    sampling: Sampling | Sequence[Sampling] | None = None,
    stop_ids: Sequence[int] | None = None,
    draft: Drafter | str | Path | None = None,
    draft_tokens: int = DRAFT_TOKENS,
    images: Sequence[Sequence[Any]] | None = None,
    videos: Sequence[Sequence[Any]] | None = None,
    tokenizer: Tokenizer | None = None,
    progress: bool = True,
    **knobs: Unpack[SamplingKnobs],
) -> list[list[int]]:
    """Continue prompts of token ids, and return the new tokens.

    Prompts may differ in length; none influences another. Shapes are rounded up to powers of two, so that a call
    with other lengths, knobs, seeds or stop ids of the same buckets compiles nothing; on a CPU all single prompts of up
    to 1,024 tokens with their continuation are of one bucket, and 2,048 the next. What is compiled is kept in the
    user's cache folder for the next process (`m3jax.compile_cache`); jax's settings are as before afterwards.

    With a draft sampled tokens keep their distribution, and greedy ones are the same in float32. In bfloat16, the
    default, a call that verifies several tokens rounds otherwise than one of a single token, and two tokens that are
    nearly tied can change places, as they can in a batch (docs/speculative.md says how often).

    Args:
      model: from `m3jax.load`.
      prompts: B lists of token ids.
      max_new_tokens: of each prompt.
      sampling: how tokens are drawn, one for all or one a prompt; None if the keywords say it.
      stop_ids: a continuation ends with the first of these; None is the model's EOS, [] is none.
      draft: proposes tokens that the model then verifies: "builtin", "ngram", the folder of an EAGLE3 draft, or a
        drafter (`m3jax.decoding.speculation`).
      draft_tokens: proposals of a round.
      images: for each prompt a list of its images, each a path or a data URL as text, a `Path`, bytes, a Pillow image,
        an array, or what `m3jax.media.process_image` gave. The prompt has one placeholder (`]<]image[>[`) for each, or
        none at all, and then they stand in front.
      videos: the same for videos; of a video also frames can be given, or what `m3jax.media.process_video` gave.
      tokenizer: of the model; needed with images and videos, since it knows the tokens around them.
      progress: whether to say on stderr what is waited for: a moving line on a terminal, elsewhere a line every 1.5
        seconds, for as long as something is waited for (`m3jax.progress`).
      **knobs: the attributes of `Sampling`, in place of one: temperature (0 is greedy), top_k, top_p, min_p,
        repetition_penalty, presence_penalty, frequency_penalty, logit_bias, bad_words, seed. The seed can be one a
        prompt; equal prompts with equal seeds get equal tokens.

    Returns:
      B lists of the new token ids only. One that met a stop id has it as its last token.

    Raises:
      TypeError: an unknown keyword.
      ValueError: a bad argument.
      FloatingPointError: the model's logits were NaN or infinite.
    """
    check_model(model)
    prompts = as_prompts(prompts)
    samplings = as_samplings(len(prompts), sampling, knobs, called=generate)
    stop = tuple(model.config.eos_token_id if stop_ids is None else stop_ids)
    params = [Params(max_new_tokens=max_new_tokens, sampling=of_prompt, stop_ids=stop) for of_prompt in samplings]
    media = _media_of(prompts, images, videos, model, progress)
    prompts = [with_placeholders(prompt, attached, tokenizer) for prompt, attached in zip(prompts, media, strict=True)]
    engine = engine_for(model, prompts, params, media=media, draft=draft, draft_tokens=draft_tokens, progress=progress)
    handles = [engine.add(*request) for request in zip(prompts, params, media, strict=True)]
    results: dict[int, Generation] = {}
    with activity(progress) as line:
        line.say("generating")
        while engine.busy:
            results |= {event.handle: event.generation for event in engine.step() if event.generation is not None}
            line.say(f"generating: {engine.timings.decoded_tokens} new tokens")
    generations = [results[handle] for handle in handles]
    check_logits(generations)
    return [generation.tokens for generation in generations]


def check_model(model: Any) -> None:
    """Raise ValueError for what an engine cannot serve, such as a `TextModel` in place of its model."""
    if isinstance(model, TargetModel):
        return
    holds_one = isinstance(getattr(model, "model", None), TargetModel)
    remedy = "give its model, .model, or call its own methods" if holds_one else "give a model from m3jax.load"
    raise ValueError(f"model is a {type(model).__name__}, which an engine cannot serve: {remedy}")


def _media_of(
    prompts: Sequence[Sequence[int]],
    images: Sequence[Sequence[Any]] | None,
    videos: Sequence[Sequence[Any]] | None,
    model: TargetModel,
    progress: bool,
) -> list[Media]:
    """Return the images and videos of each prompt, read and processed; what cannot be used is refused first."""
    shown = {"images": images, "videos": videos}
    for name, lists in shown.items():
        if lists is not None and len(lists) != len(prompts):
            raise ValueError(
                f"{name} has {len(lists)} lists for {len(prompts)} prompts: give a list for each, [] for none"
            )
    # Before a file is read: a long video takes seconds.
    if any(lists is not None and any(map(len, lists)) for lists in shown.values()) and not sees(model):
        raise ValueError("the model has no vision tower: it takes text alone; leave the images and videos out")
    none = [[]] * len(prompts)
    every = zip(images or none, videos or none, strict=True)
    return [read_media(*of_prompt, progress=progress) for of_prompt in every]
