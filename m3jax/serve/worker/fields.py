"""The fields of messages that this worker does not carry out: nothing that a client asks for is ignored."""

from collections.abc import Mapping

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

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
