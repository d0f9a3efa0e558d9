"""Videos of every container to frames, which frames are taken and when they were, and broken ones to one line."""

import io
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.comparisons import assert_close, assert_equal
from support.media import clip, image_file, picture, sound_file, video_file

from m3jax.media import (
    FRAME_RULES,
    PRESETS,
    choose_frames,
    is_moving,
    process,
    process_image,
    process_video,
    timestamps,
)
from m3jax.media.images import MediaError
from m3jax.media.videos import declared_bytes, read_video

EVERY = dict(frames="all")


@pytest.mark.parametrize("kind", ["mp4", "mov", "avi", "matroska"])
def test_containers(kind, tmp_path):
    """The frames that were written, each in its place, from bytes and from a file, with sound beside them."""
    frames, data = clip(7), video_file(clip(7), kind, sound=True)
    path = tmp_path / "clip"
    path.write_bytes(data)
    for source in (data, path):
        read = read_video(source, lambda total, rate: list(range(total)))
        assert read.frame_indices == tuple(range(7)) and read.source_fps == 10.0
        assert_close(np.stack(list(read.frames)), frames, f"frames of {kind}", "frame row column color", atol=6)


def gif_file(levels: list[int], milliseconds: int) -> bytes:
    """A GIF of grey frames, transparent on the right."""
    pixels = np.zeros((len(levels), 32, 64, 4), np.uint8)
    pixels[:, :, :32, :3], pixels[:, :, :32, 3] = np.reshape(levels, (-1, 1, 1, 1)), 255
    first, *rest = map(Image.fromarray, pixels)
    return image_file(first, "GIF", save_all=True, append_images=rest, duration=milliseconds, disposal=2)


def test_a_gif_that_moves_is_a_video():
    """Its frames and its rate; what no frame paints is white; one frame is an image, and a part of a file no GIF."""
    data = gif_file([0, 80, 160], 250)
    read = read_video(data, lambda total, rate: list(range(total)))
    frames = np.stack(list(read.frames))
    assert (read.source_fps, frames.shape) == (4.0, (3, 32, 64, 3))
    assert frames[:, 0, 0, 0].tolist() == [0, 80, 160] and (frames[:, :, 32:] == 255).all()
    for broken, reason in ((gif_file([9], 250), "a GIF of one frame is an image"), (data[:-20], "it is cut short")):
        with pytest.raises(ValueError, match=reason):
            process_video(broken)
    still = (gif_file([9], 250), image_file(picture(8, 8)), image_file(picture(8, 8), "JPEG"), picture(8, 8))
    assert is_moving(data) and not any(map(is_moving, still))
    assert is_moving(Image.open(io.BytesIO(data))) and not is_moving(Image.fromarray(picture(8, 8)))


def test_a_turned_phone():
    """Frames of an upright phone are stored lying on their side; a matrix in the header says how to turn them."""
    data = bytearray(video_file(clip(3), "mp4"))
    matrix = data.index(b"tkhd") + 4 + 40
    quarter = [0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30]  # a quarter clockwise
    data[matrix : matrix + 36] = np.array(quarter, ">i4").tobytes()
    frames = np.stack(list(read_video(bytes(data), lambda total, rate: range(total)).frames))
    assert_close(frames, np.rot90(clip(3), -1, (1, 2)), "frames", "frame row column color", atol=6)


def test_a_file_is_its_frames():
    """A file's patches are those of its frames, and its time stamps those of its own frame rate."""
    data = video_file(clip(21), rate=8)
    chosen = [0, 10]  # int(21 / 8) frames at one a second, each at the beginning of its half
    frames = list(read_video(data, lambda total, rate: chosen).frames)
    made, given_frames = process_video(data, min_frames=1), process_video(frames)
    assert made.frame_indices == (0, 10) and made.timestamps == (0.0,) and given_frames.timestamps is None
    assert_equal(made.patches, given_frames.patches, "patches", "patch value")
    assert made.grid == ((1, 4, 6),) and made.tokens == 6


def test_who_watches_is_told_of_every_frame():
    """Of a file those between chosen ones are decoded too, up to the last; of given frames the chosen are all."""
    told = []
    watch = lambda done, total: told.append((done, total))
    made = process_video(video_file(clip(21), rate=8), min_frames=1, watch=watch)
    assert made.frame_indices == (0, 10) and told == [(done, 11) for done in range(1, 12)]
    told.clear()
    process_video(clip(9), source_fps=3.0, fps=1.0, min_frames=1, watch=watch)
    assert told == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("frames", "grids"), [(1, [1]), (2, [1]), (3, [2]), (8, [4]), (9, [4, 1]), (16, [4, 4]), (19, [4, 4, 2])]
)
def test_chunks_count_temporal_patches(frames, grids):
    """A chunk has four temporal patches, eight frames; an odd last frame is paired with itself."""
    made = process_video(clip(frames))
    assert made.grid == tuple((t, 4, 6) for t in grids)
    assert made.temporal_patches == sum(grids) == -(-frames // 2) and made.tokens == 6 * made.temporal_patches
    patches = made.patches.reshape(sum(grids), -1, 3, 2, 14, 14)
    still = [process_image(clip(frames)[index]).patches.reshape(-1, 3, 2, 14, 14)[:, :, 0] for index in range(frames)]
    for index in range(2 * len(patches)):
        pixels = patches[index // 2, :, :, index % 2]
        assert_equal(pixels, still[min(index, frames - 1)], f"frame {index}", "patch color row column")


@pytest.mark.parametrize("segment", [1, 2, 3, 5, 6])
def test_a_chunk_has_as_many_temporal_patches_as_are_asked_for(segment):
    """One at least; the patches are the same however they are cut."""
    made = process_video(clip(9), segment=segment)
    sizes = [min(segment, 5 - first) for first in range(0, 5, segment)]
    assert made.grid == tuple((t, 4, 6) for t in sizes)
    np.testing.assert_array_equal(made.patches, process_video(clip(9)).patches)


RULES = {
    # 42 frames at 8 a second, one a second wanted.
    "all": list(range(42)),
    "hub": [0, 8, 16, 25, 33],
    "vllm": [0, 8, 16, 24, 32, 40],
    "sglang": [0, 8, 16, 24, 32, 40, 41],
    "smg": [0, 10, 20, 31, 41],
}


def test_frame_rules():
    """vLLM never adds the last frame, SGLang always does; the hub's rule and SMG's spread as many over the clip."""
    assert RULES.keys() == FRAME_RULES.keys()
    assert {rule: choose_frames(rule, 42, 8.0) for rule in FRAME_RULES} == RULES
    assert choose_frames("hub", 20, 10.0) == [0, 5, 10, 15] and choose_frames("hub", 20, 10.0, min_frames=1) == [0, 10]
    frames = clip(42)
    for rule, expected in RULES.items():
        made = process_video(frames, frames=rule, source_fps=8.0, fps=1.0)
        assert list(made.frame_indices) == expected, rule
    for name, preset in PRESETS.items():
        made = process_video(video_file(frames, rate=8), name)
        assert list(made.frame_indices) == choose_frames(preset.frames, 42, 8.0, preset.fps), name
    assert PRESETS["smg"].fps == 2.0
    # Frames that are given are chosen where one of the settings asks for it, by the preset's rule.
    for settings, expected in (
        (dict(fps=1.0), RULES["hub"]),
        (dict(max_frames=4), [0, 10, 21, 31]),
        ({}, RULES["all"]),
    ):
        assert list(process_video(frames, source_fps=8.0, **settings).frame_indices) == expected, settings


@given(total=st.integers(1, 300), rate=st.floats(0.5, 60.0), fps=st.floats(0.2, 5.0), most=st.integers(1, 40))
def test_chosen_frames_are_of_the_video(total, rate, fps, most):
    """Ascending, from the first frame, within bounds; frames by time are at least 1 / fps apart."""
    for rule in FRAME_RULES:
        chosen = choose_frames(rule, total, rate, fps, min(4, most), most)
        assert chosen[0] == 0 or (rule == "sglang" and most == 1), (rule, chosen)
        assert chosen == sorted(set(chosen)) and chosen[-1] < total, (rule, chosen)
        if rule in ("hub", "smg", "sglang"):
            assert len(chosen) <= most, (rule, chosen)
        if rule in ("hub", "smg"):
            assert len(chosen) >= min(4, most, total), (rule, chosen)
        if rule == "vllm":
            assert (np.diff(chosen) / rate >= 1 / fps - 2e-4).all(), chosen
        if rule in ("sglang", "smg") and len(chosen) > 1:
            assert chosen[-1] == total - 1 or (total - 1 - chosen[-1]) / rate <= 1e-4, (rule, chosen)


def test_as_few_frames_as_many():
    """The least number may be the largest: then all of them are taken that there are, or as many."""
    assert choose_frames("hub", 20, 10.0, min_frames=5, max_frames=5) == [0, 4, 8, 12, 16]
    assert choose_frames("smg", 3, 10.0, min_frames=5, max_frames=5) == [0, 1, 2]
    # A frame may come a ten-thousandth of a second early, and no earlier: one of 10,005 in a second.
    assert (
        choose_frames("vllm", 31, 10.000001) == [0, 10, 20, 30] and choose_frames("vllm", 12_000, 10_005.0)[1] == 10_004
    )
    # Of "sglang" the last frame is one more where it comes later than that after the one before it.
    assert choose_frames("sglang", 10_006, 10_005.0) == [0, 10_004] != choose_frames("sglang", 10_008, 10_005.0)
    assert len(choose_frames("hub", 7700, 1.0)) == 768 and len(choose_frames("smg", 9, 9.0)) == 4  # where none is given


def test_the_first_of_several_wrong_numbers_is_named():
    """In their order; a choice among no frames is refused before them."""
    for name, numbers in (
        ("source_fps", (0.0, 0.0, 0)), ("fps", (8.0, 0.0, 0)), ("min_frames", (8.0, 1.0, 0)),
        ("source_fps", (float("inf"), 1.0, 4)), ("fps", (8.0, -1.0, 4)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name} = .*: must be a positive number"):
            choose_frames("all", 9, *numbers)
    with pytest.raises(ValueError, match="no frames"):
        choose_frames("all", 0, 0.0)
    assert choose_frames("all", 1, 8.0) == [0]


def test_thinned_frames_keep_the_last():
    assert choose_frames("sglang", 31, 30.0, 5.0, 1, 4) == [0, 12, 24, 30]
    assert choose_frames("sglang", 31, 30.0, 5.0, 1, 1) == [30]


def test_time_stamps_are_those_of_the_first_frame_of_a_pair():
    """Trap (smg #2574): seconds of the source, not of the frames taken; an odd last frame has its own."""
    assert timestamps([0, 8, 16, 24, 41], 8.0) == (0.0, 2.0, 5.125)
    assert process_video(clip(5), source_fps=4.0).timestamps == (0.0, 0.5, 1.0)
    assert process_video(clip(5)).timestamps is None


def test_a_tier_bounds_the_pixels_of_a_whole_video(monkeypatch):
    """Trap (vLLM PR #56097): a size that the caller asks for has a limit, for frames 301,056,000 pixels in all."""
    assert process_video(clip(2), max_long_side=252).grid == ((1, 8, 16),)  # the short side is raised to 112
    frames = np.broadcast_to(np.zeros((1, 2016, 2016, 3), np.uint8), (75, 2016, 2016, 3))
    with pytest.raises(ValueError, match=r"75 frames of 2016 x 2016 pixels \(H x W\): at most 301056000"):
        process_video(frames, max_long_side=2016)
    monkeypatch.setattr(process, "LIMITS", replace(process.LIMITS, video_pixels=2 * 112 * 224))  # used up
    assert process_video(clip(2), max_long_side=252).grid == ((1, 8, 16),)
    with pytest.raises(ValueError, match="3 frames of 112 x 224 pixels"):
        process_video(clip(3), max_long_side=252)


FILE = video_file(clip(30))
BROKEN = {
    "empty": (b"", "cannot be read"),
    "text": (b"<html>not found</html>" * 9, "cannot be read.*must be a video: MP4, MOV, AVI, MKV"),
    "a word": (b"abcd" * 50, "cannot be read"),
    "an image": (image_file(picture(30, 30)), "cannot be read"),
    "cut": (FILE[: len(FILE) // 2], "cut short"),
    "an unknown codec": (video_file(clip(4), "avi").replace(b"FMP4", b"XQZ7"), "codec is none that FFmpeg knows"),
    "sound": (sound_file(), "no moving pictures, only sound"),
    "sound with a cover": (sound_file(cover=True), "no moving pictures, only sound"),
    "no frames": (video_file(clip(0)), "has no frames|no moving pictures|cannot be read"),
    "no frames in an array": (clip(0), "has no frames"),
    "no frames in a list": ([], "has no frames"),
    "frames of two sizes": (
        [picture(30, 30), picture(30, 31)],
        r"frame 1 has 30 x 31 pixels \(H x W\), the first one 30 x 30",
    ),
    "a broken frame": ([picture(30, 30), b"nothing"], "no image"),
    "a name": ("clip.mp4", "a video as str: give bytes, a Path, or frames"),
    "thin frames": (np.zeros((2, 1, 201, 3), np.uint8), "more than 200 times"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_videos_are_one_line(name, unchecked, capfd):
    source, reason = BROKEN[name]
    with pytest.raises(ValueError, match=reason) as caught:
        process_video(source)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert capfd.readouterr().err == ""  # FFmpeg says nothing of its own


def index_first(folder) -> bytes:
    """An MP4 of 30 frames that ends in them."""
    import av

    path = folder / "clip.mp4"
    with av.open(path, "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.height, stream.width, stream.pix_fmt = 32, 64, "yuv420p"
        for frame in clip(30):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path.read_bytes()


def test_a_file_that_was_cut_is_no_shorter_video(tmp_path):
    """Wherever it was cut: FFmpeg reads what there is, of MKV and of an MP4 whose index comes first without a word."""
    files = {"MP4, index first": index_first(tmp_path)}
    files |= {kind: video_file(clip(30), kind, sound=True) for kind in ("mp4", "mov", "avi", "matroska")}
    for kind, data in files.items():
        assert process_video(data, **EVERY).frame_indices == tuple(range(30)), kind
        for length in (len(data) // 2, 3 * len(data) // 4, len(data) - 300, len(data) - 1):
            with pytest.raises(ValueError, match=f"the video has {length} bytes of {len(data)}: it is cut short"):
                process_video(data[:length], **EVERY)


@pytest.mark.parametrize("kind", ["mp4", "mov", "index first"])
def test_a_file_whose_frames_have_a_size_of_64_bits(kind, tmp_path):
    """As of frames of 4 GiB and more: the size is 1, and the true one stands behind the name, in the place of a box."""
    data = index_first(tmp_path) if kind == "index first" else video_file(clip(30), kind)
    name = data.index(b"mdat")
    size = int.from_bytes(data[name - 4 : name], "big")
    assert data[name - 12 : name - 4] == (8).to_bytes(4, "big") + (b"wide" if kind == "mov" else b"free")
    wide = data[: name - 12] + (1).to_bytes(4, "big") + b"mdat" + (size + 8).to_bytes(8, "big") + data[name + 4 :]
    assert process_video(wide, **EVERY).frame_indices == tuple(range(30))
    for length in (name + 200, name + size // 2, name + size - 5, len(wide) - 1):
        with pytest.raises(ValueError, match=rf"the video has {length} bytes of \d+: it is cut short"):
            process_video(wide[:length], **EVERY)


sizes_of_bodies = st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=4)


@given(bodies=sizes_of_bodies, is_open=st.booleans(), first=st.sampled_from([b"ftyp", b"moov", b"mdat", b"wide"]))
def test_boxes_declare_their_sizes(bodies, is_open, first):
    """Of MP4: sizes of 32 bits, or of 64 behind a 1; a last box of size 0 goes on to the end, and declares nothing."""
    names, data = [first, *[b"uuid"] * 3], b""
    for name, (size, is_wide) in zip(names, bodies, strict=False):
        head = (1).to_bytes(4, "big") + name + (size + 16).to_bytes(8, "big")
        data += (head if is_wide else (size + 8).to_bytes(4, "big") + name) + bytes(size)
    assert declared_bytes(data + (b"\0\0\0\0mdat" + bytes(9)) * is_open) == len(data)
    head = 16 if bodies[0][1] else 8
    assert declared_bytes(data[:head]) == head + bodies[0][0]  # of a file that is cut behind the head of its first box
    assert declared_bytes(b"\0" * 4 + b"boxy" + data) == 8 + len(data)  # no MP4: nothing is declared


@given(header=st.integers(1, 50), body=st.integers(1, 1 << 20), widths=st.tuples(st.integers(3, 8), st.integers(3, 8)))
def test_matroska_declares_the_size_of_its_segment(header, body, widths):
    """Sizes have 1 to 8 bytes; one that its writer did not know, all ones, or one that is not there, is no size."""
    size_of = lambda size, width: ((1 << 7 * width) | size).to_bytes(width, "big")
    for width in (1, widths[0]):
        start = b"\x1a\x45\xdf\xa3" + size_of(header, width) + bytes(header) + b"\x18\x53\x80\x67"
        whole = start + size_of(body, widths[1])
        assert declared_bytes(whole) == len(whole) + body
        for unknown in (start + size_of((1 << 7 * widths[1]) - 1, widths[1]), start + b"\0" * 8, start):
            assert declared_bytes(unknown) == 0
    riff = lambda size: b"RIFF" + size.to_bytes(4, "little") + b"AVI "
    assert declared_bytes(riff(body)) == 8 + body


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (dict(), None),
        (dict(average_rate=None, guessed_rate=25), None),
        (dict(frames=0), None),  # the container does not say how many it has
        (dict(frames=4), "ends after 3 of 4 frames"),
        (dict(average_rate=None), "does not say how many frames a second it has"),
        (dict(sizes=[0, 0], frames=0), "the video has no frames"),
        (dict(width=65), r"32 x 65 pixels \(H x W\), more than 2048"),
    ],
)
def test_a_container_is_read_for_what_it_says(monkeypatch, unchecked, case, reason):
    """Packets without data are no frames; a rate that is not known may be guessed; limits hold to their end."""
    case = dict(frames=3, average_rate=8, guessed_rate=None, sizes=[9, 0, 9, 9], width=64) | case
    stream = SimpleNamespace(codec_context=SimpleNamespace(height=32, width=case.pop("width")), **case)
    container = SimpleNamespace(demux=lambda stream: [SimpleNamespace(size=size) for size in case["sizes"]])

    @contextmanager
    def opened(data):
        yield container, stream

    monkeypatch.setattr("m3jax.media.videos._opened", opened)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2048)
    told = []
    pick = lambda *given: told.append(given) or (1,)
    if reason is None:
        read = read_video(b"", pick)
        assert told == [(3, read.source_fps)] and read.frame_indices == (1,)
        assert read.source_fps == (case["average_rate"] or case["guessed_rate"])
    else:
        with pytest.raises(MediaError, match=reason):
            read_video(b"", pick)


def test_frames_that_an_index_has_and_the_file_has_not(monkeypatch):
    """The same where the container has all its bytes: the index lists 30 frames, of which the data are not there."""
    monkeypatch.setattr("m3jax.media.videos.declared_bytes", lambda data: 0)
    data = video_file(clip(30), "avi")
    with pytest.raises(ValueError, match=r"the video ends after \d+ of 30 frames: it is cut short"):
        process_video(data[: 3 * len(data) // 4], **EVERY)


def test_broken_frames_are_not_left_out():
    """Pictures that are damaged inside a whole file: an error or as many frames, never fewer without a word."""
    whole = process_video(FILE, **EVERY)
    start = FILE.index(b"mdat") + 200
    for width in (50, 500):
        damaged = FILE[:start] + bytes(width) + FILE[start + width :]
        try:
            assert process_video(damaged, **EVERY).grid == whole.grid
        except ValueError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(frames="first"), "no frame rule 'first': there are all, hub, vllm, sglang, smg"),
        (dict(frames="vllm", source_fps=None), "give source_fps"),
        (dict(source_fps=0.0), "source_fps = 0.0: must be a positive number"),
        (dict(frames="hub", fps=0.0), "fps = 0.0: must be a positive number"),
        (dict(frames="hub", max_frames=2), "max_frames = 2: must be at least min_frames = 4"),
        (dict(fps=1.0, source_fps=None), "chosen by their time: give source_fps"),
        (dict(video=FILE), "source_fps = 8.0 is for frames that are given"),
        (dict(segment=0), "segment = 0: a chunk has at least 1"),
        (dict(preset="sgl"), "no media preset 'sgl'"),
    ],
)
def test_wrong_options(options, reason):
    with pytest.raises(ValueError, match=reason):
        process_video(**(dict(video=clip(3), source_fps=8.0) | options))
