"""Wan and LTX-2 beyond what every family must pass: sizes, shifts, versions, connectors, float32 modules."""

import json
import math

import family_ltx2
import family_wan
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, LTX2Pipeline, WanPipeline
from diffusers.pipelines.ltx2 import LTX2TextConnectors

from pdd.backbones import Size, backbone_for, read_backbone
from pdd.config import Config
from pdd.formats import contract, load_transformer, save_student
from pdd.grid import Grid, partition
from pdd.pipeline import load_student
from pdd.sampling import endpoint, initial
from pdd.student import FusedStudent, widen

N = 6
GRIDS = {"video": 3.0}, {"video": 3.0, "audio": 3.0}  # of Wan and LTX-2; a pipeline steps both modalities alike


def start(backbone, shifts, batch=2):
    grid, g = Grid(N, shifts), torch.Generator().manual_seed(5)
    noise = {m: torch.randn(batch, *shape, generator=g) for m, shape in backbone.latent_shapes().items()}
    return grid, initial(noise, grid)


def walk(folder, backbone, grid, state, cond, nodes):
    transformer = widen(load_transformer(folder, torch.float32), backbone, N).eval()
    return endpoint(FusedStudent(transformer, backbone, grid).block(cond), state, grid, nodes)


def assert_close(ours, stock, tolerance=1e-4):
    for m in ours:
        assert (ours[m] - stock[m]).norm() <= tolerance * stock[m].norm(), m


# -------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("module, pipeline", [(family_wan, WanPipeline), (family_ltx2, LTX2Pipeline)])
def test_latents_have_the_shape_that_the_stock_pipeline_draws(module, pipeline, tmp_path):
    module.build(tmp_path)
    backbone = read_backbone(tmp_path, module.SIZE)
    pipe = pipeline.from_pretrained(tmp_path, **dict.fromkeys(module.ABSENT))
    pipe.set_progress_bar_config(disable=True)
    cond = module.conditioning(1, 1)
    if module is family_ltx2:
        pipe.connectors = module.Split()
    arguments = {**cond, **backbone.pipeline_arguments(), "num_inference_steps": 1, "output_type": "latent"}
    made = pipe(**arguments)
    drawn = backbone.from_pipeline(made if len(backbone.modalities) > 1 else made[0])
    assert {m: tuple(x.shape[1:]) for m, x in drawn.items()} == backbone.latent_shapes()


def test_the_published_checkpoints_default_to_the_pipelines_sizes():
    wan = {"_class_name": "WanTransformer3DModel", "patch_size": [1, 2, 2], "in_channels": 16, "out_channels": 16}
    wan |= {"rope_max_seq_len": 1024}
    assert backbone_for({"transformer": wan}).latent_shapes() == {"video": (16, 21, 60, 104)}
    ltx2 = dict.fromkeys(["patch_size", "patch_size_t", "audio_patch_size", "audio_patch_size_t"], 1)
    ltx2 |= {"_class_name": "LTX2VideoTransformer3DModel", "in_channels": 128, "caption_channels": 3840}
    shapes = backbone_for({"transformer": {**ltx2, "use_prompt_embeddings": True}}).latent_shapes()
    assert shapes == {"video": (128, 16, 16, 24), "audio": (8, 126, 16)}  # 5 seconds, 25 audio latents each


@pytest.mark.parametrize("module, size, message", [
    (family_wan, Size(height=40), "height is 40; allowed are multiples of 24 up to 768"),
    (family_wan, Size(width=8), "width is 8; allowed are multiples of 16 up to 512"),
    (family_wan, Size(height=1536), "height is 1536; .* up to 768"),
    (family_wan, Size(height=480, width=512, num_frames=9), "num_frames is 9; allowed are 5, 13, 21, ..."),
    (family_ltx2, Size(height=80), "height is 80; allowed are multiples of 32"),
    (family_ltx2, Size(width=0), "width is 0; allowed are multiples of 32"),
    (family_ltx2, Size(num_frames=16), "num_frames is 16; allowed are 1, 9, 17, ..."),
])  # fmt: skip
def test_a_size_that_does_not_fit_is_refused_by_its_knob(module, size, message, tmp_path):
    module.build(tmp_path)
    wanted = {name: getattr(module.SIZE, name) if value is None else value for name, value in vars(size).items()}
    with pytest.raises(ValueError, match=message):
        read_backbone(tmp_path, Size(**wanted)).latent_shapes()


def test_an_image_to_video_wan_is_refused():
    config = {"_class_name": "WanTransformer3DModel", "patch_size": [1, 2, 2], "in_channels": 36, "out_channels": 16}
    with pytest.raises(ValueError, match="takes 36 channels and gives 16"):
        backbone_for({"transformer": config})


# -------------------------------------------------------------------------------------------- shifts


def test_shifts_are_the_schedulers(tmp_path):
    family_wan.build(tmp_path / "wan")
    assert read_backbone(tmp_path / "wan").shifts() == {"video": 3.0}  # UniPC's flow_shift
    (tmp_path / "wan" / "scheduler" / "scheduler_config.json").write_text(json.dumps({"shift": 5.0}))
    assert read_backbone(tmp_path / "wan").shifts() == {"video": 5.0}
    family_ltx2.build(tmp_path / "ltx2")
    assert read_backbone(tmp_path / "ltx2").shifts() == {"video": 2.0, "audio": 2.0}


@pytest.mark.parametrize("kind", ["exponential", "linear"])
def test_dynamic_shifting_is_the_pipelines_at_this_size(kind, tmp_path):
    from diffusers.pipelines.ltx2.pipeline_ltx2 import calculate_shift

    family_ltx2.build(tmp_path)
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_image_seq_len=8, max_image_seq_len=40, base_shift=0.6, max_shift=1.5,
        time_shift_type=kind,
    )  # fmt: skip
    scheduler.save_pretrained(tmp_path / "scheduler")
    backbone = read_backbone(tmp_path, family_ltx2.SIZE)
    tokens = math.prod(backbone.latent_shapes()["video"][1:])
    scheduler.set_timesteps(sigmas=[1.0, 0.7, 0.2], mu=calculate_shift(tokens, 8, 40, 0.6, 1.5))
    u = torch.tensor([1.0, 0.7, 0.2])
    for shift in backbone.shifts().values():
        torch.testing.assert_close(shift * u / (1 + (shift - 1) * u), scheduler.sigmas[:-1])


# -------------------------------------------------------------------------------------------- parity in other versions


def test_wan_22_ti2v_from_text_needs_no_time_per_token(tmp_path):
    """Its pipeline expands the time to tokens, which from text alone are all the same."""
    family_wan.build(tmp_path, patch=(1, 2, 2), expand_timesteps=True)
    backbone = read_backbone(tmp_path, family_wan.SIZE)
    (grid, state), cond = start(backbone, GRIDS[0]), family_wan.conditioning(2, 1)
    ours = walk(tmp_path, backbone, grid, state, cond, list(range(N + 1)))
    assert_close(ours, family_wan.stock(tmp_path, state, {"video": grid.sigma["video"][:-1].tolist()}, cond))


@pytest.mark.parametrize("version", family_ltx2.VERSIONS)
def test_ltx_2_versions_on_one_clock(version, tmp_path):
    """Nothing of the pipeline's own is touched but its scheduler; what else depends on the clock must agree."""
    family_ltx2.build(tmp_path, version)
    split = family_ltx2.Split()
    split.widths = read_backbone(tmp_path).widths
    backbone = read_backbone(tmp_path, family_ltx2.SIZE)
    (grid, state), cond = start(backbone, GRIDS[1]), family_ltx2.conditioning(2, 1, sum(split.widths))
    sigmas = {m: s[:-1].tolist() for m, s in grid.sigma.items()}
    ours = walk(tmp_path, backbone, grid, state, cond, list(range(N + 1)))
    assert_close(ours, family_ltx2.stock(tmp_path, state, sigmas, cond, connectors=split))


def test_prompt_embeds_of_ltx_2_are_what_its_connectors_return(tmp_path):
    family_ltx2.build(tmp_path)
    backbone = read_backbone(tmp_path, family_ltx2.SIZE)
    grid, state = start(backbone, GRIDS[1])
    raw = family_ltx2.conditioning(2, 1, 20)  # two layers of a text encoder of width 10
    connectors = LTX2TextConnectors.from_pretrained(tmp_path / "connectors")
    with torch.no_grad():
        video, audio, mask = connectors(*raw.values())
    cond = {"prompt_embeds": torch.cat([video, audio], -1), "prompt_attention_mask": mask}
    sigmas = {m: s[:-1].tolist() for m, s in grid.sigma.items()}
    ours = walk(tmp_path, backbone, grid, state, cond, list(range(N + 1)))
    assert_close(ours, family_ltx2.stock(tmp_path, state, sigmas, raw, connectors=connectors))


def test_an_ltx_2_students_pipeline_does_not_normalise_noise(tmp_path):
    """It would take given latents for the VAEs'. Checkpoints have statistics far from 0 and 1."""
    family_ltx2.build(tmp_path / "teacher")
    backbone = read_backbone(tmp_path / "teacher", family_ltx2.SIZE)
    (grid, state), cond = start(backbone, GRIDS[1]), family_ltx2.conditioning(2, 1)
    transformer = widen(load_transformer(tmp_path / "teacher", torch.float32), backbone, N)
    config = Config(teacher=str(tmp_path / "teacher"), pdd_steps=N, block_size_min=N, block_size_max=N)
    save_student(tmp_path / "student", backbone, transformer.state_dict(), contract(config, grid, backbone, 1, False))
    pipe = load_student(tmp_path / "student", text_encoders=False)
    for vae in (pipe.vae, pipe.audio_vae):
        vae.latents_mean.fill_(0.5)
        vae.latents_std.fill_(2.0)
    out = pipe(
        **cond, **backbone.to_pipeline(state), **backbone.pipeline_arguments(), num_inference_steps=2,
        output_type="latent",
    )  # fmt: skip
    ours = walk(tmp_path / "teacher", backbone, grid, state, cond, partition(N, 2))
    assert_close({m: (x - 0.5) / 2.0 for m, x in backbone.from_pipeline(out).items()}, ours)
