"""Real media as latents: what the stock pipelines decode from them, aspect buckets, and training on them."""

import importlib
import json
import re
import shutil
from functools import wraps
from io import BytesIO
from pathlib import Path

import av
import datasets
import family_ltx2
import numpy as np
import pytest
import torch
from conftest import SMALL, TRAIN, equal, lines, student_weights
from datasets import Dataset, load_from_disk
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from PIL import Image
from test_encode import with_text_encoders

from pdd.backbones import REGISTRY, Size, read_backbone
from pdd.backbones.ltx2 import LTX2, log_mel
from pdd.buckets import Dropped, MediaEncoder, aspect_buckets
from pdd.draws import Grouped, Shuffle
from pdd.formats import load_autoencoders
from pdd.media import pixels, read_frames, read_picture, read_sound, write_sound, write_video
from pdd.prompts import read_rows

MODULES = sorted({target.split(":")[0] for target in REGISTRY.values()})


# ------------------------------------------------------------------------------------ against the stock pipelines


@pytest.fixture(scope="module", params=MODULES)
def family(request, tmp_path_factory):
    """(its name, its test module, a checkpoint folder)."""
    module = importlib.import_module(f"family_{request.param}")
    folder = tmp_path_factory.mktemp(request.param) / "teacher"
    module.build(folder)
    return request.param, module, folder


def ordinary(folder, module, backbone, latents, cond):
    """(stock pipeline without its text encoder, arguments that make it start from these latents)."""
    absent = [*module.ABSENT, *(["connectors"] if (folder / "connectors").exists() else [])]
    pipe = DiffusionPipeline.from_pretrained(folder, **dict.fromkeys(absent))
    pipe.scheduler = FlowMatchEulerDiscreteScheduler()  # some of the families' own cannot make 2 steps
    backbone.fit_pipeline(pipe)
    start = {**backbone.to_pipeline(latents), **backbone.pipeline_arguments()}
    return pipe, {**backbone.pipeline_condition(cond), **start, "num_inference_steps": 1, "output_type": "pt"}


def decoded_by_stock(folder, module, backbone, latents):
    """Component -> what the stock pipeline's autoencoders decode when its transformer predicts no motion at all."""
    cond = module.conditioning(1, 1)
    modular = hasattr(module, "whole")
    pipe, arguments = (
        module.whole(folder, latents, cond) if modular else ordinary(folder, module, backbone, latents, cond)
    )
    pipe.set_progress_bar_config(disable=True)
    forward = pipe.transformer.forward
    still = wraps(forward)(lambda *a, **k: tuple(torch.zeros_like(v) for v in forward(*a, **k)))
    pipe.transformer.forward, decoded = still, {}
    for name in ("vae", "audio_vae"):
        if part := getattr(pipe, name, None):
            decode = part.decode
            part.decode = lambda z, *a, _d=decode, _n=name, **k: decoded.setdefault(_n, _d(z, *a, **k))
    pipe(**arguments)
    return {name: value[0] for name, value in decoded.items()}


def test_the_stock_pipeline_decodes_what_was_encoded(family):
    """Scaled as the transformer sees them: the pipeline's own way back ends in ``decode(encode(x).mode())``."""
    name, module, folder = family
    size = getattr(module, "SIZE", Size(height=16, width=16))
    backbone = read_backbone(folder, size)
    vaes = load_autoencoders(folder, torch.float32, "cpu")
    g = torch.Generator().manual_seed(0)
    shape = (
        1,
        len(backbone.picture_mode),
        *([size.num_frames] if backbone.frame_rate else []),
        size.height,
        size.width,
    )
    media = {backbone.modalities[0]: torch.rand(shape, generator=g) * 2 - 1}
    if "audio" in backbone.modalities:
        media["audio"] = torch.rand(1, 2, 48000, generator=g) - 0.5
    if name == "ltx2":
        for vae in vaes.values():  # as initialised the statistics are 0 and 1
            vae.latents_mean.uniform_(-1, 1, generator=g)
            vae.latents_std.uniform_(0.5, 2, generator=g)
            vae.save_pretrained(folder / ("vae" if vae is vaes["vae"] else "audio_vae"))
    with torch.no_grad():
        latents = backbone.encode_media(vaes, media)
        shapes = backbone.latent_shapes()
        assert {m: tuple(x.shape[1:]) for m, x in latents.items()} == shapes
        pictures = media[backbone.modalities[0]]
        pictures = pictures[:, :, None] if name.startswith("qwen") else pictures  # its autoencoder is a video's
        taken = module.taken(vaes, media, shapes) if "audio" in media else {"vae": pictures}
        expected = {n: vaes[n].decode(vaes[n].encode(x).latent_dist.mode()).sample for n, x in taken.items()}
        decoded = decoded_by_stock(folder, module, backbone, latents)
    assert decoded.keys() == expected.keys()
    for part in expected:
        torch.testing.assert_close(decoded[part], expected[part], rtol=1e-3, atol=1e-4)
        assert expected[part].std() > 1e-2


# ---------------------------------------------------------------------------------------------------- reading media


def test_pictures_are_upright_cut_at_their_sides_and_in_range(tmp_path):
    wide = np.zeros((10, 40, 3), np.uint8)
    wide[:, 15:25] = 255  # the middle quarter is white
    Image.fromarray(wide).save(tmp_path / "wide.png")
    middle = pixels(read_picture(str(tmp_path / "wide.png")), 10, 10)
    assert middle.shape == (3, 10, 10) and bool((middle == 1).all())
    half = pixels(read_picture(str(tmp_path / "wide.png")), 10, 20)
    assert half[:, :, :4].mean() == -1 and half[:, :, 6:14].mean() == 1
    tall = Image.fromarray(wide.transpose(1, 0, 2))
    exif = tall.getexif()
    exif[0x0112] = 6  # to be shown turned by a quarter
    tall.save(tmp_path / "turned.png", exif=exif)
    assert read_picture(str(tmp_path / "turned.png")).size == (40, 10)


def test_frames_are_those_shown_at_the_family_s_rate(tmp_path):
    """A ramp of 12 frames a second, read at 6, 12 and 24, is the same ramp."""
    ramp = torch.linspace(0.1, 0.9, 12)[:, None, None, None].expand(12, 3, 32, 48)
    write_video(tmp_path / "ramp.mp4", ramp, 12.0)
    for fps, expected in ((12.0, range(12)), (6.0, range(0, 12, 2)), (24.0, [i // 2 for i in range(24)])):
        frames = [np.asarray(frame).mean() / 255 for frame in read_frames(str(tmp_path / "ramp.mp4"), fps)]
        assert frames == pytest.approx([float(ramp[i, 0, 0, 0]) for i in expected], abs=0.02), fps


def test_a_video_that_was_filmed_turned_is_shown_upright(tmp_path):
    left = torch.zeros(2, 3, 32, 48)
    left[:, :, :, :16] = 1  # white at the left
    write_video(tmp_path / "flat.mp4", left, 12.0)
    with av.open(str(tmp_path / "flat.mp4")) as source, av.open(str(tmp_path / "turned.mp4"), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        turn = av.bitstream.BitStreamFilterContext(
            "h264_metadata=display_orientation=insert:rotate=90", source.streams.video[0], stream
        )
        for packet in [p for raw in source.demux(video=0) for p in turn.filter(raw)] + turn.filter(None):
            packet.stream = stream
            target.mux(packet)
    frame = np.asarray(next(read_frames(str(tmp_path / "turned.mp4"), 12.0)))
    # a quarter against the clock: what was at the left is below
    assert frame.shape == (48, 32, 3) and frame[36:].mean() > 230 and frame[:28].mean() < 20


def test_sound_is_resampled_to_stereo_and_cut(tmp_path):
    time = torch.arange(24000) / 24000
    write_sound(tmp_path / "a.wav", 0.5 * torch.sin(2 * torch.pi * 440 * time)[None], 24000)
    sound = read_sound(str(tmp_path / "a.wav"), 16000, 0.75)
    assert sound.shape == (2, 12000) and torch.equal(sound[0], sound[1])
    assert sound.max() == pytest.approx(0.5, rel=0.01)  # as loud as it was
    spectrum = np.abs(np.fft.rfft(sound[0][:8000]))
    assert spectrum.argmax() * 16000 / 8000 == 440
    write_video(tmp_path / "silent.mp4", torch.zeros(2, 3, 32, 48), 12.0)
    with pytest.raises(ValueError, match="no sound"):
        read_sound(str(tmp_path / "silent.mp4"), 16000, 1.0)


def test_a_mel_spectrogram_is_where_and_as_loud_as_a_tone(tmp_path):
    """Of a sine in the middle of a bin's triangle, from the definition: half its amplitude times the window's sum."""
    from types import SimpleNamespace

    config = SimpleNamespace(sample_rate=16000, mel_hop_length=160, mel_bins=64)
    vae = SimpleNamespace(config=config, temporal_compression_ratio=4)
    # Slaney's scale is linear up to 1000 Hz in mels of 200 / 3 Hz, and logarithmic above
    top = 15 + 27 * np.log(8000 / 1000) / np.log(6.4)
    edges = np.linspace(0, top, 66)[10:13] * 200 / 3  # Hz; bin 10 lies below 1000 Hz
    assert edges[2] < 1000
    tone = 0.25 * torch.sin(2 * torch.pi * edges[1] * torch.arange(48000) / 16000)
    mel = log_mel(torch.stack([tone, torch.zeros(48000)])[None], vae, 50)
    assert mel.shape == (1, 2, 200, 64)
    middle = mel[0, 0, 20:180].exp()
    assert (middle.argmax(1) == 10).all() and torch.allclose(mel[0, 1].exp(), torch.tensor(1e-5))
    # a window's spectrum is as wide as the triangle, so sum over bins, each of area 1: |X| summed, times the spacing in Hz
    spectrum = np.abs(np.fft.rfft(np.hanning(1025)[:-1] * tone[8000:9024].numpy()))
    weights = np.interp(np.fft.rfftfreq(1024, 1 / 16000), edges, [0, 2 / (edges[2] - edges[0]), 0])
    assert middle[80, 10].item() == pytest.approx(spectrum @ weights, rel=0.02)


# --------------------------------------------------------------------------------------------------- aspect buckets


def test_buckets_have_about_one_area_and_sides_that_the_family_can_make(family):
    name, module, folder = family
    frames = getattr(module, "SIZE", Size()).num_frames
    backbone = read_backbone(folder)
    # the tiny ones' tables of positions are too small
    backbone.config |= {"pos_embed_max_size": 256, "rope_max_seq_len": 1024}
    size = Size(480, 768, frames)
    buckets = aspect_buckets(backbone, size, 7)
    assert buckets[0] == size and len(buckets) in (7, 8) and aspect_buckets(backbone, size, 0) == [size]
    ratios = sorted(b.width / b.height for b in buckets)
    assert ratios[0] == pytest.approx(0.5, rel=0.1) and ratios[-1] == pytest.approx(2, rel=0.1)
    assert min(abs(ratio - 1) for ratio in ratios) < 0.02
    for bucket in buckets:
        backbone.at(bucket).latent_shapes()  # does not raise
        assert bucket.height * bucket.width == pytest.approx(480 * 768, rel=0.07) and bucket.num_frames == frames


def test_tokens_are_what_the_transformer_gets(family):
    from pdd.formats import load_transformer
    from pdd.student import Velocity

    name, module, folder = family
    backbone = read_backbone(folder, getattr(module, "SIZE", None))
    transformer, lengths = load_transformer(folder, torch.float32), {}
    linears = getattr(module, "TOKENS", {m: head.module for m, head in backbone.heads.items()})
    for m, linear in linears.items():
        take = lambda module, args, _m=m: lengths.update({_m: args[0].shape[1]})  # noqa: E731
        transformer.get_submodule(linear).register_forward_pre_hook(take)
    state = {m: torch.zeros(1, *shape) for m, shape in backbone.latent_shapes().items()}
    Velocity(transformer, backbone)(state, {m: torch.full((1,), 0.5) for m in state}, module.conditioning(1, 1))
    text = lengths["image"] - backbone.tokens()["image"] if name == "qwen_image21" else 0
    assert {m: n - text for m, n in lengths.items()} == backbone.tokens() and 0 <= text < 10


# ------------------------------------------------------------------------------------------- encoding and training


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A table of pictures of many sizes, of which some cannot be used."""
    folder, g = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    sizes = {
        "wide": (56, 24),
        "wider": (64, 32),
        "tall": (20, 40),
        "square": (30, 32),
        "own": (24, 16),
        "small": (12, 8),
    }
    for name, (width, height) in sizes.items():
        Image.fromarray(g.integers(0, 255, (height, width, 3), np.uint8)).save(folder / f"{name}.png")
    (folder / "broken.png").write_bytes((folder / "own.png").read_bytes()[:500])
    names = [*sizes, "broken", "missing"]
    lines = [json.dumps({"image": f"{name}.png", "prompt": f"a {name} one"}) for name in names]
    (folder / "pictures.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def encoded(pictures, warm, tmp_path_factory):
    """(Flux with tiny text encoders, its dataset of those pictures, what encoding said)."""
    folder = tmp_path_factory.mktemp("encoded")
    with_text_encoders("flux", folder / "teacher")
    code, output = warm(
        "encode", "--teacher", folder / "teacher", "--prompts", pictures / "pictures.jsonl", "--media", "--height", "16",
        "--width", "24", "--out", folder / "data", "--part", "3", "--max_sequence_length", "16",
    )  # fmt: skip
    assert code == 0, output
    return folder / "teacher", folder / "data", output


def test_pictures_are_encoded_into_the_nearest_bucket_and_the_rest_is_named(pictures, encoded):
    teacher, data, output = encoded
    rows = load_from_disk(str(data))
    buckets = dict(zip(rows["prompt"], rows["bucket"]))
    assert buckets == {
        "": "", "a wide one": "12x28", "a wider one": "12x28", "a tall one": "28x12", "a square one": "20x20",
        "a own one": "16x24",
    }  # fmt: skip
    assert "12x28        2 rows  21 image tokens" in output and "20x20        1 rows  25 image tokens" in output
    assert "2 unreadable, the first" in output and "1 too small, the first" in output and "12" in output
    record = json.loads((data / "pdd_encoding.json").read_text())
    assert [(Path(name).stem, why.split(":")[0]) for name, why in record["media"]["dropped"]] == [
        ("small", "too small"), ("broken", "unreadable"), ("missing", "unreadable"),
    ]  # fmt: skip
    row = next(row for row in rows if row["prompt"] == "a own one")
    own = torch.from_numpy(np.array(Image.open(pictures / "own.png"))).permute(2, 0, 1)[None] / 127.5 - 1
    vae = load_autoencoders(teacher, torch.float32, "cpu")["vae"]
    with torch.no_grad():
        latents = (vae.encode(own).latent_dist.mode() - 0.06) * 1.5  # its shift and scale
    assert row["latents_shape"] == [4, 8, 12]
    torch.testing.assert_close(torch.tensor(row["latents"]).view(1, 4, 8, 12), latents, rtol=1e-4, atol=1e-5)


def test_groups_of_draws_are_of_one_kind_and_no_row_is_drawn_more_often_than_another():
    kinds, group = torch.tensor([2, 0, 1, 1, 2, 2, 2]), 3
    rows = [Grouped(kinds, 5).at(i, group) for i in range(2 * 7 * group)]
    first, second = rows[: 7 * group], rows[7 * group :]
    assert sorted(first) == sorted(second) == sorted([*range(7)] * group) and first != second
    assert all(len({int(kinds[row]) for row in rows[i : i + group]}) == 1 for i in range(0, len(rows), group))
    # a kind's own rows pass one after another, from one group to the next
    mine = [row for row in rows if kinds[row] == 2]
    assert all(len(set(mine[i : i + 4])) == 4 for i in range(0, len(mine), 4))
    one, shuffle = Grouped(torch.zeros(10, dtype=torch.int64), 5), Shuffle(10, 5)
    assert [one.at(i, group) for i in range(25)] == [shuffle.at(i) for i in range(25)]


DRAWN = """
from pdd.data import Rows
shuffled = Rows.shuffled
def watched(self, serials, group):
    rows = shuffled(self, serials, group)
    print(*(f"<{s}:{r}:{self.buckets[r]}>" for s, r in zip(serials.tolist(), rows.tolist())), flush=True)
    return rows
Rows.shuffled = watched
"""


def test_a_global_batch_is_of_one_bucket_whatever_the_ranks_and_every_row_has_its_share(encoded, warm, tmp_path):
    teacher, data, _ = encoded
    flags = ["--teacher", teacher, "--data", data, "--height", "16", "--width", "24", "--rollout_mode", "data_latent",
             "--max_train_steps", "10", "--shift", "3"]  # fmt: skip
    runs, drawn = {}, {}
    for ranks, micro, rounds in ((1, 4, 1), (2, 2, 1), (1, 2, 2)):
        runs[ranks, rounds] = run = tmp_path / f"run{ranks}{rounds}"
        batch = ["--train_micro_batch_size_per_gpu", micro, "--gradient_accumulation_steps", rounds]
        code, output = warm("train", *TRAIN[1:], *SMALL, *flags, *batch, "--run", run, prelude=DRAWN, ranks=ranks)
        assert code == 0, output
        drawn[ranks, rounds] = {int(s): (int(r), b) for s, r, b in re.findall(r"<(\d+):(\d+):(\w+)>", output)}
    draws = [drawn[1, 1][serial] for serial in range(40)]
    batches = [{bucket for _, bucket in draws[i : i + 4]} for i in range(0, 40, 4)]
    assert all(len(buckets) == 1 for buckets in batches) and len(set.union(*batches)) == 4
    # 5 rows: in each 5 global batches of 4 every row comes 4 times, in another order
    rows = [row for row, _ in draws]
    assert all(sorted(part) == sorted([*set(rows)] * 4) for part in (rows[:20], rows[20:])) and rows[:20] != rows[20:]
    assert drawn[2, 1] == drawn[1, 2] == drawn[1, 1]
    assert lines(runs[2, 1], "loss") == pytest.approx(lines(runs[1, 1], "loss"), rel=1e-4)


def test_a_bucketed_run_resumes_as_if_nothing_had_happened(encoded, warm, tmp_path):
    teacher, data, _ = encoded
    flags = ["--teacher", teacher, "--data", data, "--height", "16", "--width", "24", "--rollout_mode", "data_latent",
             "--validation_every", "3", "--validation_steps", "2", "--validation_prompts", "a tall one",
             "--shift", "3"]  # fmt: skip
    whole = warm.train(tmp_path / "whole", *flags)
    warm.train(tmp_path / "run", *flags, "--stop_after", "2")
    assert warm("train", *TRAIN[1:], "--resume", "--run", tmp_path / "run")[0] == 0
    assert lines(tmp_path / "run", "loss") == lines(whole, "loss")
    assert equal(student_weights(tmp_path / "run"), student_weights(whole))


@pytest.mark.parametrize("size, message", [
    (["--height", "32", "--width", "32", "--shift", "3"], "size is height 32, width 32"),
    (["--height", "16", "--width", "24", "--shift", "null"], "shift is not given"),
])  # fmt: skip
def test_one_grid_for_all_buckets_or_none(size, message, encoded, warm, tmp_path):
    """The tiny scheduler's shift is a steep function of the number of tokens."""
    teacher, data, _ = encoded
    copy = tmp_path / "teacher"
    shutil.copytree(teacher, copy)
    path = copy / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_image_seq_len": 20, "max_image_seq_len": 30}))
    flags = ["--teacher", copy, "--data", data, "--rollout_mode", "data_latent", "--run", tmp_path / "run"]
    code, output = warm("train", *TRAIN[1:], *SMALL, *flags, *size)
    assert code == 2 and message in output, output


def test_videos_are_cut_to_lengths_that_the_family_can_make(warm, tmp_path):
    with_text_encoders("wan", tmp_path / "teacher")
    clips = {"long": (40, 16.0), "slow": (20, 8.0), "middle": (11, 16.0), "short": (4, 16.0)}
    g = torch.Generator().manual_seed(0)
    for name, (frames, fps) in clips.items():
        write_video(tmp_path / f"{name}.mp4", torch.rand(frames, 3, 96, 128, generator=g), fps)
    table = "video,caption\n" + "".join(f"{name}.mp4,a {name} clip\n" for name in clips)
    (tmp_path / "clips.csv").write_text(table)
    code, output = warm(
        "encode", "--teacher", tmp_path / "teacher", "--prompts", tmp_path / "clips.csv", "--column", "caption", "--media",
        "--height", "48", "--width", "64", "--num_frames", "13", "--min_frames", "5", "--out", tmp_path / "data",
        "--max_sequence_length", "16", "--buckets", "0",
    )  # fmt: skip
    assert code == 0, output
    rows = load_from_disk(str(tmp_path / "data"))
    assert dict(zip(rows["prompt"], rows["bucket"])) == {
        "": "", "a long clip": "48x64x13", "a slow clip": "48x64x13", "a middle clip": "48x64x5",
    }  # fmt: skip
    assert "1 too short" in output and "4 frames at 16 a second, 5 are needed" in output, output
    assert [row["latents_shape"] for row in rows] == [[], [4, 4, 6, 8], [4, 4, 6, 8], [4, 2, 6, 8]]


def test_a_video_s_own_sound_is_encoded_unless_another_file_is_named(tmp_path, monkeypatch):
    family_ltx2.build(tmp_path / "teacher")
    backbone = read_backbone(tmp_path / "teacher")
    vaes = load_autoencoders(tmp_path / "teacher", torch.float32, "cpu")
    encoder = MediaEncoder(backbone, [Size(64, 96, 17)], 9, 1.0, vaes)
    frames, time = torch.rand(12, 3, 64, 96), torch.arange(8000) / 16000
    tones = {pitch: 0.5 * torch.sin(2 * torch.pi * pitch * time).expand(2, -1) for pitch in (300, 3000)}
    write_video(tmp_path / "clip.mp4", frames, 24.0, tones[300], 16000)
    write_video(tmp_path / "silent.mp4", frames, 24.0)
    for pitch, tone in tones.items():
        write_sound(tmp_path / f"{pitch}.wav", tone, 16000)
    clip, silent = str(tmp_path / "clip.mp4"), str(tmp_path / "silent.mp4")
    bucket, own = encoder({"video": clip})
    shapes = {m: tuple(x.shape) for m, x in own.items()}
    assert bucket == "64x96x9" and shapes == backbone.at(Size(64, 96, 9)).latent_shapes()
    _, same = encoder({"video": BytesIO(Path(clip).read_bytes())})  # as a dataset may hold it
    assert torch.equal(same["video"], own["video"]) and torch.equal(same["audio"], own["audio"])
    encode, heard = LTX2.encode_media, []
    monkeypatch.setattr(
        LTX2, "encode_media", lambda self, v, media: heard.append(media["audio"]) or encode(self, v, media)
    )
    dubbed = str(tmp_path / "3000.wav")
    for video, audio, pitch in ((clip, None, 300), (clip, dubbed, 3000), (silent, dubbed, 3000)):
        encoder({"video": video, **({"audio": audio} if audio else {})})
        sound = heard[-1][0, 1]
        assert sound.shape == (6000,)  # as long as 9 frames
        assert np.abs(np.fft.rfft(sound)).argmax() * 16000 / 6000 == pytest.approx(pitch, abs=5)
    with pytest.raises(Dropped, match="unreadable: there is no sound in it"):
        encoder({"video": silent})


def test_what_is_too_small_may_be_enlarged_when_asked(pictures, encoded):
    backbone = read_backbone(encoded[0])
    vaes, small = load_autoencoders(encoded[0], torch.float32, "cpu"), {"image": str(pictures / "small.png")}  # 8 x 12
    assert MediaEncoder(backbone, [Size(16, 24)], 0, 2.0, vaes)(small)[0] == "16x24"
    with pytest.raises(Dropped, match="too small: 8 x 12 pixels, for 16x24"):
        MediaEncoder(backbone, [Size(16, 24)], 0, 1.9, vaes)(small)


def test_tables_name_files_beside_them_or_hold_them(pictures, tmp_path):
    """A folder of pictures with metadata, and a parquet file with the pictures inside."""
    shutil.copy(pictures / "own.png", tmp_path / "own.png")
    (tmp_path / "metadata.csv").write_text("file_name,prompt\nown.png,a own one\n")
    ((prompt, files),) = read_rows(str(tmp_path), "prompt", ("image",))
    assert prompt == "a own one" and Path(files["image"]) == tmp_path / "own.png"
    table = Dataset.from_dict({"image": [str(tmp_path / "own.png")], "prompt": ["a own one"]}).cast_column(
        "image", datasets.Image()
    )
    table.to_parquet(str(tmp_path / "inside.parquet"))
    ((_, files),) = read_rows(str(tmp_path / "inside.parquet"), "prompt", ("image",))
    assert read_picture(files["image"]).tobytes() == Image.open(pictures / "own.png").tobytes()
    ((_, files), *_) = read_rows(str(pictures / "pictures.jsonl"), "prompt", ("image",))
    assert Path(files["image"]) == pictures / "wide.png"


BAD = {
    "--height 16 --width 24 --teacher assets/digits": "has no vae/",
    "--height 16": "width is not given",
    "--height 15 --width 24": "height is 15; allowed are multiples of 4",
    "--height 16 --width 24 --buckets -1": "buckets is -1",
    "--height 16 --width 24 --max_enlarge 0": "max_enlarge is 0.0",
    "--height 16 --width 24 --prompts {other}": "has no column 'image'",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input(flags, pictures, encoded, warm, tmp_path):
    (tmp_path / "other.txt").write_text("a prompt\n")
    words = flags.format(other=tmp_path / "other.txt").split()
    source = ["--prompts", pictures / "pictures.jsonl", "--media", "--out", tmp_path / "out"]
    code, output = warm("encode", "--teacher", encoded[0], *source, *words)
    assert code == 2 and BAD[flags] in output and not (tmp_path / "out").exists(), output
