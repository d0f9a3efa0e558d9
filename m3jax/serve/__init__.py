"""Serving: a gateway that speaks HTTP and needs no accelerator, and a worker that owns the engine.

Between them is the protocol of the open gateway SMG (`vllm.grpc.engine`), as messages of `smg_grpc_proto`: in one
process they are passed as they are, between two by gRPC. Either half works with the other half of somebody else.
"""
