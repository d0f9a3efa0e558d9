"""The way in which every gRPC server of this package listens: at a port of its own, for messages of a stated size."""

import grpc

UNBOUNDED = -1  # bytes of a message


def server_options(most_bytes: int = UNBOUNDED) -> tuple[tuple[str, int], ...]:
    """Return the options of a server, which a client's channel may have as well.

    Args:
      most_bytes: of one message in either direction; gRPC's own bound, 4 MiB, holds neither pages nor patches.
    """
    return (
        ("grpc.max_receive_message_length", most_bytes),
        ("grpc.max_send_message_length", most_bytes),
        ("grpc.so_reuseport", 0),  # or a second server would share the port in silence
    )


def bound_port(server: grpc.Server | grpc.aio.Server, host: str, port: int) -> int:
    """Have a server listen at an address, and return its port.

    Args:
      server: that has not been started.
      host: address to listen on.
      port: 0 takes a free one.

    Raises:
      ValueError: the port cannot be listened on.
    """
    try:
        return server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ValueError(f"cannot listen on {host}:{port}: is something else there? Choose another --port") from error
