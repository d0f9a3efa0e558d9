"""The shape of the house: its rooms floor by floor, and what each may know (tests/package/test_package.py)."""

# The rooms of the house from the ground up. A room imports from the floors below its own: neither from above, nor from
# the other rooms of its floor. A new room goes on the lowest floor that is above all that it imports.
FLOORS = (
    ("m3jax.interrupts", "m3jax.messages", "m3jax.version", "pallas_kernels"),
    (
        *(
            "m3jax.arrays",
            "m3jax.assets",
            "m3jax.branches",
            "m3jax.compile_cache",
            "m3jax.config_keys",
            "m3jax.console",
            "m3jax.files",
        ),
        *("m3jax.make", "m3jax.parallel", "m3jax.platform", "m3jax.ranges"),
    ),
    ("m3jax.config", "m3jax.mxfp8", "m3jax.numerics", "m3jax.progress", "m3jax.text", "m3jax.tiles"),
    ("m3jax.media", "m3jax.spec", "m3jax.weights"),
    ("m3jax.msa",),
    ("m3jax.ops",),
    ("m3jax.cache", "m3jax.vision"),
    ("m3jax.execution",),
    ("m3jax.model",),
    ("m3jax.checkpoint",),
    ("m3jax.decoding",),
    ("m3jax.completion", "m3jax.hosts", "m3jax.transfer"),
    ("m3jax.dialogue", "m3jax.hub"),
    ("m3jax.inside", "m3jax.planning", "m3jax.text_model", "m3jax.train"),
    ("m3jax.cli", "m3jax.vectors"),
    ("m3jax.compare", "m3jax.evaluate", "m3jax.serve"),
    ("m3jax", "m3jax.chat", "m3jax.generate", "m3jax.plan"),
    ("m3jax.__main__",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# Rooms and modules that know less than their floor would let them: all that each may import of the house.
ALL_THEY_KNOW = {
    **dict.fromkeys(
        ("m3jax.arrays", "m3jax.assets", "m3jax.branches", "m3jax.compile_cache", "m3jax.interrupts", "m3jax.messages"),
        (),
    ),
    **dict.fromkeys(("m3jax.make", "m3jax.mxfp8", "m3jax.parallel", "m3jax.platform"), ()),
    "m3jax.config": ("m3jax.config_keys", "m3jax.files", "m3jax.messages"),
    # Token ids in, token ids out: neither text nor folders; of files the bytes of tensors alone, of pictures their
    # patches, not where these come from.
    "m3jax.decoding": (
        *("m3jax.cache", "m3jax.cache.device", "m3jax.cache.device_pages", "m3jax.cache.drafted"),
        *(
            "m3jax.cache.offload.pool",
            "m3jax.cache.prefix",
            "m3jax.cache.storage",
            "m3jax.compile_cache",
            "m3jax.files.tensors",
            "m3jax.media.packing",
            "m3jax.ranges",
        ),
        *("m3jax.media.placeholders", "m3jax.media.places", "m3jax.media.sizes", "m3jax.messages", "m3jax.model"),
        *("m3jax.model.eagle3", "m3jax.parallel", "m3jax.platform", "m3jax.progress", "m3jax.tiles"),
    ),
    "m3jax.files": ("m3jax.messages",),
    "m3jax.spec": ("m3jax.config",),
    "m3jax.console": ("m3jax.interrupts", "m3jax.messages"),
    "m3jax.media": ("m3jax.config", "m3jax.messages"),
    "m3jax.progress": ("m3jax.compile_cache", "m3jax.interrupts"),
    "m3jax.text": ("m3jax.files", "m3jax.messages"),
    "m3jax.tiles": ("m3jax.platform",),
    "m3jax.weights": ("m3jax.mxfp8",),
    "m3jax.spec.vision": (),
}
# Of other people's: distributions that these may import besides the standard library.
ALL_THEY_NEED = {
    "m3jax.compile_cache": ("filelock", "jax"),
    **dict.fromkeys(("m3jax.console", "m3jax.interrupts", "m3jax.messages"), ()),
    "m3jax.files": ("jaxtyping", "ml_dtypes", "numpy"),
    "m3jax.media": ("PIL", "av", "jaxtyping", "numpy"),
    "m3jax.spec.msa": ("einops", "jax", "jaxtyping"),
    "m3jax.progress": ("rich",),
    "m3jax.text": ("jinja2", "jsonschema", "tokenizers"),  # two are an extra's
    "m3jax.spec.vision": ("jax", "jaxtyping", "numpy"),
}
KERNEL_CALLER = "m3jax.ops"

# Rooms that import, at their first use, what extras bring.
EXTRAS_OF = {
    "m3jax.compare": ("oracle", "plots"),
    "m3jax.evaluate": ("plots",),
    "m3jax.inside": ("plots",),
    "m3jax.media": ("media",),
    "m3jax.serve": ("serve",),
    "m3jax.train": ("train",),
    "m3jax.transfer": ("serve",),
    **dict.fromkeys(("m3jax.dialogue", "m3jax.text"), ("chat",)),
}
