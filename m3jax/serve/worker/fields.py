"""Every field of the messages that come in, and what becomes of it: nothing that a client asks for is ignored."""

from collections.abc import Mapping

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

# Fields that are carried out, by message. "No effect" says why a field that is read changes nothing here.
READ: Mapping[str, Mapping[str, str]] = {
    "GenerateRequest": {
        "request_id": "names the request for Abort",
        "tokenized": "the prompt",
        "text": "the prompt, which the worker's tokenizer reads",
        "sampling_params": "see SamplingParams",
        "stream": "chunks as they come",
        "mm_inputs": "see MultimodalInputs",
        "extra_mm_inputs": "see MultimodalInputs",
        "data_parallel_rank": "0 alone: there is one rank",
    },
    "TokenizedInput": {
        "original_text": "no effect: it is for logs",
        "input_ids": "the prompt",
    },
    "SamplingParams": {
        "temperature": "Sampling.temperature; 1 where it is not set",
        "top_p": "Sampling.top_p; 0 is off",
        "top_k": "Sampling.top_k; 0 is off",
        "min_p": "Sampling.min_p",
        "frequency_penalty": "Sampling.frequency_penalty",
        "presence_penalty": "Sampling.presence_penalty",
        "repetition_penalty": "Sampling.repetition_penalty; 0 is off",
        "max_tokens": "Params.max_new_tokens; all that fit where it is not set",
        "min_tokens": "Params.min_tokens, for stop strings too",
        "stop": "the worker decodes, and ends the request",
        "stop_token_ids": "Params.stop_ids, beside the EOS ids",
        "skip_special_tokens": "whether a stop string can be in a special token",
        "spaces_between_special_tokens": "no effect: tokenizers of tokenizer.json put none there",
        "ignore_eos": "EOS ids do not stop",
        "n": "requests of one prompt, with the seeds that follow",
        "logprobs": "Params.top_logprobs, 0 to 20",
        "prompt_logprobs": "the same for the prompt",
        "seed": "Sampling.seed, modulo 2^32; drawn where it is not set",
        "include_stop_str_in_output": "no effect on ids: the token that completes a stop string is always the last",
        "logit_bias": "Sampling.logit_bias",
        "truncate_prompt_tokens": "the last so many tokens of the prompt; -1 is as many as fit",
        "grammar_from_first_token": "the constraint does not wait for the end of the reasoning",
        "json_schema": "a constraint",
        "regex": "a constraint",
        "grammar": "a constraint",
        "structural_tag": "a constraint",
        "json_object": "a constraint; false is none",
        "choice": "a constraint",
    },
    "ChoiceConstraint": {"choices": "the texts to choose from"},
    "MultimodalInputs": {
        "pixel_values": "the patches",
        "model_specific_tensors": "the grids, by the names in `m3jax.serve.worker.tensors`",
        "im_token_id": "the id in whose places the features go",
        "mm_placeholders": "the order of the pictures in the prompt",
        "mm_hashes": "the pictures' names in KV events; the engine knows equal ones by the digest of their patches",
        "batched_keys": "no effect: the grids say where one picture ends",
        "flat_keys": "no effect: likewise",
        "keep_on_cpu_keys": "no effect: all are read on the host",
        "modality": "images or videos",
        "encoder_input_key": "pixel_values or pixel_values_videos",
    },
    "PlaceholderRange": {"offset": "of a picture in the prompt", "length": "no effect: ids say where features go"},
    "TensorData": {"shape": "of the array", "dtype": "of the array", "inline": "its bytes, little-endian"},
}

# Fields that are refused where they are set, with what to do instead.
REFUSED: Mapping[str, Mapping[str, str]] = {
    "GenerateRequest": {
        "kv_transfer_params": "this worker does prompts and new tokens itself; leave it out",
        "kv_transfer_params_json": "this worker does prompts and new tokens itself; leave it out",
        "media_refs": "this worker fetches nothing: have the gateway preprocess (mm_inputs)",
    },
    "TensorData": {
        "shm": "this worker shares no memory: send the bytes inline",
        "remote": "this worker fetches nothing: send the bytes inline",
    },
}


def check_fields(message: Message) -> None:
    """Raise ValueError if a field is set that this worker does not carry out; the messages inside are looked at too.

    Args:
      message: what came in.

    Raises:
      ValueError: the first such field by name, or by number if the protocol has grown since.
    """
    name = message.DESCRIPTOR.name
    if unknown := [field.field_number for field in UnknownFieldSet(message)]:
        raise ValueError(
            f"{name} has field {unknown[0]}, which this worker's version of the protocol does not know: leave it out, "
            "or update smg-grpc-proto"
        )
    for field, value in message.ListFields():
        if reason := REFUSED.get(name, {}).get(field.name):
            raise ValueError(f"{field.name}: {reason}")
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            inner = value.values() if field.message_type.fields_by_name["value"].message_type else ()
        else:
            inner = value if field.is_repeated else (value,)
        for each in inner:
            check_fields(each)
