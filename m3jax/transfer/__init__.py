"""Pages of prompts from one engine to another: one process reads prompts, another decodes.

An engine that reads prompts (`Prefiller`) gives out their pages while it goes on; `PageReceiver` puts what came into a
snapshot that another engine imports. Between the two are frames (`m3jax.transfer.frames`), by gRPC if `service` and
`client` carry them.
"""

from m3jax.transfer.client import PrefillClient, Transferred
from m3jax.transfer.frames import Frame, TransferError
from m3jax.transfer.identity import transfer_identity
from m3jax.transfer.prefiller import Prefiller
from m3jax.transfer.receiver import PageReceiver

__all__ = [
    "Frame",
    "PageReceiver",
    "PrefillClient",
    "Prefiller",
    "TransferError",
    "Transferred",
    "transfer_identity",
]
