"""The gateway: requests become token ids and patches, and token ids become text, reasoning and tool calls again.

It never touches an accelerator. What it asks for and what it gets are the messages of the protocol `vllm.grpc.engine`,
whether the worker is in its process or behind gRPC.
"""
