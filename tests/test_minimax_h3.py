"""MiniMax-H3 beyond what every family must pass: batches, clocks, sizes, float32 time, prompts, its own pipeline."""

import json
import shutil
import string

import family_minimax_h3 as family
import pytest
import torch
from conftest import lines
from datasets import load_from_disk
from diffusers.modular_pipelines.minimax_h3.before_denoise import patchify_video_latents
from diffusers.modular_pipelines.minimax_h3.encoders import (
    MiniMaxH3Ref2VAReferenceEncoderStep,
    MiniMaxH3TextEncoderStep,
)
from diffusers.modular_pipelines.minimax_h3.references import MiniMaxH3VideoReference
from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from pdd.backbones import Size, backbone_for, read_backbone
from pdd.config import Config
from pdd.formats import contract, load_autoencoders, load_transformer, read_student, save_student
from pdd.grid import Grid, partition
from pdd.media import write_video
from pdd.pipeline import load_student
from pdd.sampling import initial
from pdd.student import FusedStudent, Velocity, head_parameters, widen

N = 12
PUBLISHED = {"_class_name": "MiniMaxH3Transformer3DModel", "patch_size": [1, 2, 2], "in_channels": 24,
             "audio_in_channels": 32, "num_layers": 50}  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("minimax_h3") / "teacher"
    family.build(folder)
    return folder


@pytest.fixture()
def backbone(teacher):
    return read_backbone(teacher, family.SIZE)


def start(backbone, batch=2):
    """(grid on the checkpoint's own shifts, noise at its start)."""
    grid, g = Grid(N, backbone.shifts()), torch.Generator().manual_seed(5)
    noise = {m: torch.randn(batch, *shape, generator=g) for m, shape in backbone.latent_shapes().items()}
    return grid, initial(noise, grid)


@pytest.fixture(scope="module")
def student(teacher, tmp_path_factory):
    """A student whose heads are the teacher's."""
    backbone, folder = read_backbone(teacher, family.SIZE), tmp_path_factory.mktemp("student")
    transformer = widen(load_transformer(teacher, torch.float32), backbone, N)
    config = Config(teacher=str(teacher), pdd_steps=N, block_size_min=2, block_size_max=6)
    grid = Grid(N, backbone.shifts())
    save_student(folder, backbone, transformer.state_dict(), contract(config, grid, backbone, 1, False))
    return folder


# -------------------------------------------------------------------------------------------- batches, clocks, sizes


def test_samples_of_a_batch_have_their_own_times_texts_and_plans(teacher, backbone):
    """Every sample of a batch as the base transformer gives it alone, with its own head in place."""
    grid, state = start(backbone, 3)
    transformer = widen(load_transformer(teacher, torch.float32), backbone, N).eval()
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in head_parameters(transformer):
            p.add_(torch.randn(p.shape, generator=g) * p.std())
    cond, starts, heads = family.conditioning(3, 1), [0, 4, 9], [2, 5, 11]
    model, fused = Velocity(transformer, backbone), FusedStudent(transformer, backbone, grid)
    sigma = {m: s[starts].float() for m, s in grid.sigma.items()}
    out = model(state, sigma, cond, grid.plan(starts, [[n + 1, n + 3] for n in starts], [[k] for k in heads]))
    for i, k in enumerate(heads):
        fused.place(k, k + 1)
        one = [{name: v[i : i + 1] for name, v in d.items()} for d in (state, sigma, cond)]
        alone = backbone.forward(transformer, *one, dict.fromkeys(state, 1))
        for m in state:
            torch.testing.assert_close(out[m][i, 2], alone[m][0, 0], rtol=1e-4, atol=1e-5)


def test_each_modality_has_the_shift_of_its_scheduler(teacher):
    assert read_backbone(teacher).shifts() == {"video": 12.0, "audio": 3.0}
    configs = {"transformer": PUBLISHED, "scheduler": {"shift": 5.0}, "audio_scheduler": {"shift": 2.0}}
    assert backbone_for(configs).shifts() == {"video": 5.0, "audio": 2.0}


def test_the_published_checkpoint_defaults_to_the_pipelines_size():
    # 48 x 84 latents of 16 pixels; 7 clips of 17 frames in 5 latents and 5 frames in 2; 124 / 24 s of 40 sounds
    assert backbone_for({"transformer": PUBLISHED}).latent_shapes() == {
        "video": (24, 37, 48, 84),
        "audio": (2, 32, 207),
    }


@pytest.mark.parametrize("size, message", [
    (Size(height=80), "height is 80; allowed are multiples of 32"),
    (Size(width=0), "width is 0; allowed are multiples of 32"),
    (Size(num_frames=107), "num_frames is 107; allowed are 124, 141, ... 345"),  # 4.5 seconds
    (Size(num_frames=362), "num_frames is 362; allowed are"),  # 15.1 seconds
    (Size(num_frames=121), "num_frames is 121; allowed are"),
])  # fmt: skip
def test_a_size_that_does_not_fit_is_refused_by_its_knob(size, message):
    with pytest.raises(ValueError, match=message):
        backbone_for({"transformer": PUBLISHED}, size).latent_shapes()


def test_patches_in_time_and_a_checkpoint_for_references_are_refused(teacher, tmp_path):
    with pytest.raises(ValueError, match="patch_size is .*; allowed are those of 1 in time"):
        backbone_for({"transformer": {**PUBLISHED, "patch_size": [2, 2, 2]}})
    (tmp_path / "transformer_ref").mkdir()
    (tmp_path / "transformer_ref" / "config.json").write_text(json.dumps(PUBLISHED))
    with pytest.raises(ValueError, match="transformer/config.json cannot be read"):
        read_backbone(tmp_path)


def test_unconditional_zeros_leave_one_row_of_text(backbone):
    assert backbone._text_rows(torch.tensor([[1, 1, 0]])).tolist() == [0, 1]
    assert backbone._text_rows(torch.zeros(1, 3)).tolist() == [0]


def test_token_norms_are_those_of_the_packed_rows(backbone):
    _, state = start(backbone)
    norms = backbone.token_norm(state)
    for i in range(2):
        rows = patchify_video_latents(state["video"][i : i + 1], family.PATCH).norm(dim=1)
        video = norms["video"].expand_as(state["video"])[i : i + 1]
        torch.testing.assert_close(patchify_video_latents(video, family.PATCH), rows[:, None].expand(-1, 4 * 6))
        torch.testing.assert_close(norms["audio"][i, :, 0], state["audio"][i].permute(0, 2, 1).norm(dim=2))


# -------------------------------------------------------------------------------------------- float32


def test_students_keep_in_float32_what_diffusers_does(student):
    loaded = read_student(student, torch.bfloat16).transformer
    kept = [name for name, p in loaded.named_parameters() if p.dtype == torch.float32]
    assert {name.split(".")[0] for name in kept} == {
        "proj_in", "audio_proj_in", "time_embedder", "proj_out", "audio_proj_out"
    }  # fmt: skip
    assert loaded.dtype == torch.bfloat16


# -------------------------------------------------------------------------------------------- prompts


class Processor:
    """In the place of Qwen3VLProcessor, which needs torchvision: no token of a prompt alone is a picture."""

    def create_mm_token_type_ids(self, ids):
        return [[0 for _ in prompt] for prompt in ids]


def with_text_encoder(folder):
    """The tiny checkpoint with a tiny text encoder of 52 layers."""
    vocabulary = {token: i for i, token in enumerate([*string.printable, "Ġ", "<|endoftext|>"])}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[])
    small = {"hidden_size": family.TEXT, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    text = {**small, "num_hidden_layers": 52, "head_dim": 8, "vocab_size": len(vocabulary),
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}  # fmt: skip
    vision = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "out_hidden_size": family.TEXT,
              "deepstack_visual_indexes": [0]}  # fmt: skip
    torch.manual_seed(1)
    encoder = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision))
    family.build(folder, text_encoder=encoder, tokenizer=tokenizer)


def test_prompt_embeddings_are_the_stock_pipeline_s(warm, tmp_path):
    with_text_encoder(tmp_path / "teacher")
    prompts = ["a red house", "two birds on a stone"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    words = ["--teacher", tmp_path / "teacher", "--prompts", tmp_path / "prompts.txt", "--out", tmp_path / "data"]
    code, output = warm("encode", *words, "--max_sequence_length", 24)
    assert code == 0, output
    rows = load_from_disk(str(tmp_path / "data")).with_format("torch")
    assert list(rows["prompt"]) == ["", *prompts] and rows[:]["prompt_embeds_mask"].dtype == torch.int64
    pipe = MiniMaxH3TextEncoderStep().init_pipeline(str(tmp_path / "teacher"))
    pipe.load_components(names=["text_encoder", "tokenizer"], dtype=torch.float32)
    pipe.update_components(processor=Processor())
    for row, prompt in zip(rows, [" ", *prompts]):  # a prompt without a token cannot be encoded
        embeds = pipe(prompt=prompt, output="prompt_embeds")[0]
        length = int(row["prompt_embeds_mask"].sum())
        assert row["prompt_embeds_mask"].tolist() == [1] * length + [0] * (24 - length)
        torch.testing.assert_close(row["prompt_embeds"][:length], embeds, rtol=1e-4, atol=1e-5)
    words[-1] = tmp_path / "other"
    code, output = warm("encode", *words, "--max_sequence_length", 8)
    assert code == 2 and "error: max_sequence_length is 8; prompt 'a red house'... has " in output, output


# -------------------------------------------------------------------------------------------- media


def test_media_become_what_the_stock_pipeline_makes_of_a_reference(teacher):
    """Up to its rounding of video latents to float16."""
    g, size = torch.Generator().manual_seed(2), Size(24, 32, 158)  # 263.3 sounds long
    backbone, vaes = read_backbone(teacher, size), load_autoencoders(teacher, torch.float32, "cpu")
    with torch.no_grad():  # it draws its latents: of no deviation here
        vaes["vae"].quant_conv.weight[4:] = 0
        vaes["vae"].quant_conv.bias[4:] = -30
    frames = torch.randint(0, 256, (158, 24, 32, 3), generator=g, dtype=torch.uint8)
    sound = torch.rand(2, 263 * 200, generator=g) - 0.5
    step = MiniMaxH3Ref2VAReferenceEncoderStep().init_pipeline()
    step.update_components(**vaes)
    reference = MiniMaxH3VideoReference(frames=frames.numpy(), fps=24, audio=sound)
    names = ["condition_latents", "audio_condition_latents"]
    (video,), (audio,) = step(normalized_references=[reference], output=names).values()
    video, audio = video[0], audio.unflatten(0, (2, 263)).transpose(1, 2)
    pixels, longer = frames.permute(3, 0, 1, 2) / 127.5 - 1, torch.cat([sound, torch.ones(2, 67)], 1)  # 158 frames'
    media = {"video": torch.stack([pixels, pixels.flip(1)]), "audio": torch.stack([longer, -longer])}
    with torch.no_grad():
        made = backbone.encode_media(vaes, media)
        rounded = backbone.encode_media(load_autoencoders(teacher, torch.bfloat16, "cpu"), media)
    torch.testing.assert_close(made["video"][0], video, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(made["audio"][0], audio, rtol=1e-4, atol=1e-5)
    assert video.std() > 0.1 and audio.std() > 0.1 and not torch.allclose(audio[0], audio[1])
    # both encoders stay in float32 whatever the rest is, and so do their inputs
    assert all(torch.equal(rounded[m], made[m]) for m in made)


def test_clips_of_several_sizes_and_lengths_are_encoded_and_trained_on(warm, tmp_path):
    with_text_encoder(tmp_path / "teacher")
    g, time = torch.Generator().manual_seed(0), torch.arange(8 * 16000) / 16000
    tone = 0.5 * torch.sin(2 * torch.pi * 300 * time)
    clips = {  # frames, a second, height, width, channels of sound, seconds of it
        "wide": (125, 24, 48, 96, 2, 8), "tall": (75, 12, 96, 48, 1, 8), "cut off": (125, 24, 48, 64, 2, 1),
        "short": (50, 12, 48, 64, 2, 8), "silent": (63, 12, 48, 64, 0, 0),
    }  # fmt: skip
    for name, (frames, fps, height, width, channels, seconds) in clips.items():
        sound = tone[: seconds * 16000].expand(channels, -1) if channels else None
        write_video(tmp_path / f"{name}.mp4", torch.rand(frames, 3, height, width, generator=g), fps, sound, 16000)
    table = [json.dumps({"video": f"{name}.mp4", "prompt": f"a {name} one"}) for name in clips]
    (tmp_path / "clips.jsonl").write_text("\n".join(table))
    size = ["--height", 24, "--width", 32, "--num_frames", 141]
    encode = ["encode", "--teacher", tmp_path / "teacher", "--prompts", tmp_path / "clips.jsonl", "--media", *size,
              "--min_frames", 124, "--buckets", 2, "--max_sequence_length", 24, "--out"]  # fmt: skip
    code, output = warm(*encode, tmp_path / "data")
    assert code == 0, output
    rows = load_from_disk(str(tmp_path / "data"))
    assert dict(zip(rows["prompt"], rows["bucket"])) == {
        "": "", "a wide one": "24x40x124", "a tall one": "36x16x141", "a cut off one": "24x32x124",
    }  # fmt: skip
    shapes = [[row["video_latents_shape"], row["audio_latents_shape"]] for row in rows if row["bucket"]]
    assert shapes == [[[4, 37, 6, 10], [2, 8, 207]], [[4, 42, 9, 4], [2, 8, 235]], [[4, 37, 6, 8], [2, 8, 207]]]
    assert "1 rows  370 video tokens  414 audio tokens" in output, output
    assert "100 frames at 24 a second, 124 are needed" in output and "there is no sound in it" in output, output
    run = warm.train(
        tmp_path / "run", "--teacher", tmp_path / "teacher", "--data", tmp_path / "data", *size, "--rollout_mode",
        "data_latent", "--train_micro_batch_size_per_gpu", 1, "--max_train_steps", 3,
    )  # fmt: skip
    assert len(lines(run, "loss")) == 3 and all(0 < loss < 1e3 for loss in lines(run, "loss"))
    shutil.rmtree(tmp_path / "teacher" / "audio_vae")
    code, output = warm(*encode, tmp_path / "other")
    assert code == 2 and "has no audio_vae/" in output and "Traceback" not in output, output


# -------------------------------------------------------------------------------------------- students in its pipeline


def test_a_student_decodes_what_the_whole_stock_pipeline_does(teacher, backbone, student):
    grid, state = start(backbone, 1)
    cond, nodes = family.conditioning(1, 1), partition(N, 3)
    pipe = load_student(student, text_encoders=False)
    made = pipe(**cond, **backbone.to_pipeline(state), **backbone.pipeline_arguments(), num_inference_steps=3)
    stock, arguments = family.whole(teacher, state, cond)
    sigmas = {m: s[nodes[:-1]].tolist() for m, s in grid.sigma.items()}
    stock.update_components(
        scheduler=family.Given(sigmas["video"]), audio_scheduler=family.Given(sigmas["audio"])
    )  # fmt: skip
    whole = stock(**arguments, output=["videos", "audio", "sampling_rate"])
    assert made.frames.shape == (1, 124, 3, 24, 32) and made.audio.shape == (1, 2, 207 * 200)
    torch.testing.assert_close(made.frames, whole["videos"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(made.audio, whole["audio"], rtol=1e-4, atol=1e-4)
    assert backbone.sound_rate(pipe) == whole["sampling_rate"]


def test_drawn_noise_starts_at_the_grid_s_first_level(backbone, student):
    pipe = load_student(student, text_encoders=False)
    arguments = dict(**family.conditioning(2, 1), num_inference_steps=2, output_type="latent")
    drawn = pipe(**arguments, generator=torch.Generator().manual_seed(3))
    g = torch.Generator().manual_seed(3)
    noise = {m: 0.999 * torch.randn(2, *shape, generator=g) for m, shape in backbone.latent_shapes().items()}
    given = pipe(**arguments, **backbone.to_pipeline(noise))
    for a, b in zip(drawn, given):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_prompts_go_in_as_text(tmp_path, warm):
    with_text_encoder(tmp_path / "teacher")
    backbone = read_backbone(tmp_path / "teacher", family.SIZE)
    transformer, grid = (
        widen(load_transformer(tmp_path / "teacher", torch.float32), backbone, N),
        Grid(N, backbone.shifts()),
    )
    config = Config(teacher=str(tmp_path / "teacher"), pdd_steps=N, block_size_min=N, block_size_max=N)
    save_student(tmp_path / "student", backbone, transformer.state_dict(), contract(config, grid, backbone, 1, False))
    pipe, (_, state) = load_student(tmp_path / "student"), start(backbone)
    cond = backbone.encode_prompts(pipe, ["a dog", "rain at sea"], backbone.max_sequence_length)
    arguments = dict(**backbone.to_pipeline(state), num_inference_steps=1, guidance_scale=1, output_type="latent")
    for a, b in zip(pipe(["a dog", "rain at sea"], **arguments), pipe(**cond, **arguments)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("arguments, message", [
    ({"guidance_scale": 3.0}, "guidance_scale is 3.0; allowed is 1"),
    ({"num_inference_steps": 1}, "needs a block of 12 intervals but block_size_max was 6"),
    ({"num_frames": 100}, "num_frames is 100; allowed are"),
])  # fmt: skip
def test_what_a_student_cannot_do_is_refused(arguments, message, student):
    pipe = load_student(student, text_encoders=False)
    with pytest.raises(ValueError, match=message):
        pipe(**family.conditioning(1, 1), output_type="latent", **{"num_inference_steps": 2, **arguments})


def test_a_damaged_component_is_refused_by_name(teacher, student, tmp_path):
    shutil.copytree(teacher, tmp_path / "teacher")
    (tmp_path / "teacher" / "audio_vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="audio_vae.* cannot be loaded"):
        load_student(student, base_model=tmp_path / "teacher", text_encoders=False)
