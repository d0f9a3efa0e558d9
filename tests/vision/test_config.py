"""What a tower's configuration may say, and what a config.json may."""

import math
from dataclasses import fields, replace

import pytest
from support import tiny

from m3jax.vision import VisionConfig

TINY = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, num_channels=3, patch_size=14,
    temporal_patch_size=2, spatial_merge_size=2, vision_segment_max_frames=4, layer_norm_eps=1e-5, rope_theta=1e4,
    projector_hidden_size=64, image_token_id=250, video_token_id=251,
)  # fmt: skip
HUB = VisionConfig.tiny().add_to(tiny.config("dM"))
COMPRESSION = "img_token_compression_config"


def test_a_number_that_is_not_given_is_m3s():
    """config.json of MiniMaxAI/MiniMax-M3."""
    assert {field.name: field.default for field in fields(VisionConfig)} == dict(
        hidden_size=1280, num_hidden_layers=32, num_attention_heads=16, intermediate_size=5120, num_channels=3,
        patch_size=14, temporal_patch_size=2, spatial_merge_size=2, vision_segment_max_frames=4, layer_norm_eps=1e-5,
        rope_theta=10_000.0, projector_hidden_size=6144, image_token_id=200_025, video_token_id=200_026,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_size=10), "heads of 5 are too narrow to turn by three axes: at least 6"),
        (dict(patch_size=1 << 31), "patch_size = 2147483648: must be an integer of 32 bits, at least 1"),
        (dict(image_token_id=-1), "image_token_id = -1: must be an integer of 32 bits, at least 0"),
        (dict(hidden_size=True), "hidden_size = True: must be an integer"),
        (dict(rope_theta=0), "rope_theta = 0: must be a positive float32 number"),
        (dict(layer_norm_eps=math.inf), "layer_norm_eps = inf: must be a positive float32 number"),
    ],
)
def test_numbers_that_no_tower_can_have(changes, message, unchecked):
    with pytest.raises(ValueError) as refused:
        VisionConfig.tiny(**changes)
    assert str(refused.value) == "unsupported vision tower: " + str(refused.value).partition(": ")[2]
    assert message in str(refused.value)


def test_the_smallest_numbers_that_a_tower_can_have():
    ones = {field.name: 1 for field in fields(VisionConfig) if field.type is int}
    config = VisionConfig(**ones | dict(hidden_size=6, image_token_id=0, video_token_id=0))
    assert config.head_dim == 6 and VisionConfig.tiny(patch_size=(1 << 31) - 1).patch_size == (1 << 31) - 1


def test_a_configuration_comes_back_from_the_hub_s_form():
    """With every field other than M3's; what is said twice may be, in agreement."""
    other = VisionConfig(**TINY | dict(
        num_channels=1, patch_size=3, temporal_patch_size=5, spatial_merge_size=3, vision_segment_max_frames=7,
        layer_norm_eps=1e-3, rope_theta=5.0, projector_hidden_size=33, image_token_id=1, video_token_id=2,
    ))  # fmt: skip
    assert VisionConfig.of(other.add_to(tiny.config("dM"))) == other
    assert HUB.extra["image_token_index"] == 250 and HUB.vision_config["projection_dim"] == 48
    twice = HUB.vision_config | {"head_dim": 32, "rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}
    assert VisionConfig.of(replace(HUB, vision_config=twice)) == VisionConfig.tiny()
    without = {key: value for key, value in twice.items() if key != "rope_theta"}
    assert VisionConfig.of(replace(HUB, vision_config=without)).rope_theta == 1e4
    lacking = {key: value for key, value in HUB.vision_config.items() if key != "temporal_patch_size"}
    assert VisionConfig.of(replace(HUB, vision_config=lacking)).temporal_patch_size == 2  # from the compression's
    with pytest.raises(ValueError, match="this model has no vision_config: it takes text alone"):
        VisionConfig.of(tiny.config("dM"))


@pytest.mark.parametrize(
    ("where", "changes", "message"),
    [
        ("extra", {"projector_hidden_act": "relu"}, "projector_hidden_act = 'relu' is not supported (only 'gelu')"),
        ("extra", {"multimodal_projector_bias": 1}, "multimodal_projector_bias = 1 is not supported (only True)"),
        ("extra", {"vision_feature_layer": -2}, "vision_feature_layer = -2 is not supported (only -1)"),
        ("extra", {"vision_feature_select_strategy": "default"}, "is not supported (only 'full')"),
        ("extra", {COMPRESSION: [1]}, f"{COMPRESSION} = [1]: must be an object"),
        ("extra", {COMPRESSION: {"spatial_merge_size": 3}}, f": {COMPRESSION}.spatial_merge_size = 3: 2 elsewhere"),
        ("vision", {COMPRESSION: {"temporal_patch_size": 1}},
         f"vision_config.{COMPRESSION}.temporal_patch_size = 1: 2 elsewhere"),
        ("vision", {COMPRESSION: {"image_token_compression_method": "pool"}}, "= 'pool' is not supported"),
        ("vision", {"model_type": "siglip"}, "(only 'clip_vision_model' or 'minimax_m3_vl_vision' or None)"),
        ("vision", {"position_embedding_type": "learned"}, "(only 'rope')"),
        ("vision", {"rope_parameters": [1]}, "rope_parameters = [1]: must have rope_type and rope_theta alone"),
        ("vision", {"rope_parameters": {"rope_type": "yarn"}}, "'yarn' is not supported (only 'axial' or 'default')"),
        ("vision", {"num_attention_heads": 0, "head_dim": 33}, "head_dim = 33: must be hidden_size"),
    ],
)  # fmt: skip
def test_a_config_json_of_another_tower_is_refused(where, changes, message):
    """With all that is wrong: as notes too where it is more than a line holds."""
    if where == "extra":
        config = replace(HUB, extra=HUB.extra | changes)
    else:
        config = replace(HUB, vision_config=HUB.vision_config | changes)
    with pytest.raises(ValueError) as refused:
        VisionConfig.of(config)
    assert message in str(refused.value)


def test_many_problems_are_notes_of_the_error():
    config = replace(HUB, vision_config=HUB.vision_config | {f"key_{n:02}": n for n in range(40)})
    with pytest.raises(ValueError) as refused:
        VisionConfig.of(config)
    assert [note.split(":")[0] for note in refused.value.__notes__] == [f"unknown key 'key_{n:02}'" for n in range(40)]
