"""What Flux.1, Qwen-Image and Qwen-Image 2.1 have of their own, beside what every family must pass."""

import json

import diffusers
import family_flux
import family_qwen_image
import family_qwen_image21
import pytest
import torch
from conftest import REPO
from datasets import Dataset
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from safetensors.torch import load_file

from pdd.backbones import Size, backbone_for, read_backbone
from pdd.config import Config, Guidance
from pdd.formats import contract, load_transformer, save_student
from pdd.grid import Grid
from pdd.pipeline import load_student
from pdd.sampling import endpoint, initial
from pdd.student import FusedStudent, Velocity, widen
from pdd.teacher import Teacher, Unconditional

FAMILIES = {"flux": family_flux, "qwen_image": family_qwen_image, "qwen_image21": family_qwen_image21}
PIPELINES = {"flux": "FluxPipeline", "qwen_image": "QwenImagePipeline", "qwen_image21": "QwenImage21Pipeline"}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """(name, its test module, a checkpoint folder, its backbone)."""
    module, folder = FAMILIES[request.param], tmp_path_factory.mktemp(request.param) / "teacher"
    module.build(folder)
    return request.param, module, folder, read_backbone(folder, module.SIZE)


def features(sigma: torch.Tensor) -> torch.Tensor:
    """Cosines and sines of the time ``1000 sigma``, ``[B, 256]``, as these models embed it."""
    angles = 1000 * sigma.double()[:, None] * 10000 ** (-torch.arange(128, dtype=torch.float64) / 128)
    return torch.cat([angles.cos(), angles.sin()], 1)


RECORD = """
from diffusers.models.embeddings import TimestepEmbedding
from safetensors.torch import save_file
kept, seen = TimestepEmbedding.forward, []
def forward(self, sample, condition=None):
    seen.append(sample.detach().float())
    save_file({{"seen": torch.cat(seen)}}, {path!r})
    return kept(self, sample, condition)
TimestepEmbedding.forward = forward
"""


def test_time_is_not_rounded_in_a_bfloat16_run(family, warm, tmp_path):
    """Under ZeRO-3 with checkpointing, of teacher and student: every time embedded is a node of the grid."""
    _, module, folder, backbone = family
    cond = module.conditioning(1, 1)
    rows = {"prompt": ["a thing"], **{c: v.tolist() for c, v in cond.items()}}
    Dataset.from_dict(rows).save_to_disk(str(tmp_path / "data"))
    ds_config = json.loads((REPO / "ds_configs" / "zero3.json").read_text())
    ds_config["bf16"] = {"enabled": True}
    (tmp_path / "ds.json").write_text(json.dumps(ds_config))
    prelude = RECORD.format(path=str(tmp_path / "seen.safetensors"))
    warm.train(
        tmp_path / "run", "--ds_config", tmp_path / "ds.json", "--teacher", folder, "--data", tmp_path / "data",
        "--type_rk", "euler", "--max_train_steps", "2", "--block_size_min", "8", "--gradient_checkpointing", "true",
        "--shift", "3", *(f"--{side}={getattr(module.SIZE, side)}" for side in ("height", "width")), prelude=prelude,
    )  # fmt: skip
    seen = load_file(tmp_path / "seen.safetensors")["seen"].double()
    nodes = Grid(16, {"image": 3.0}).sigma["image"][:-1]
    assert len(nodes.bfloat16().unique()) < len(nodes) or (nodes.bfloat16().double() - nodes).abs().max() > 1e-3
    allowed = {"flux": [3.5], "qwen_image21": [0.0]}.get(family[0], [])  # embedded guidance; the time of text
    known = features(torch.cat([nodes, torch.tensor(allowed, dtype=torch.float64)]))  # [N, 256]
    distance = (seen[:, None] - known).abs().amax(-1)  # [forwards, N]
    assert distance.amin(1).max() <= 2**-8
    assert len(distance.argmin(1).unique()) > 1 + len(allowed)


@pytest.mark.parametrize("scheduler", [
    {"use_dynamic_shifting": True}, {"use_dynamic_shifting": True, "time_shift_type": "linear", "base_shift": 0.7},
    {"use_dynamic_shifting": True, "base_shift": 0.6, "max_shift": 0.9, "max_image_seq_len": 8192},
    {"use_dynamic_shifting": False, "shift": 3.0},
])  # fmt: skip
@pytest.mark.parametrize("size", [Size(256, 512), Size(1024, 1024)])
def test_the_shift_is_the_schedulers_at_this_resolution(family, scheduler, size):
    name, _, _, backbone = family
    configs = {**backbone.configs, "scheduler": scheduler}
    configs["vae"] = {"block_out_channels": [1] * 4, "temperal_downsample": [True] * 3}
    stock, sigmas = FlowMatchEulerDiscreteScheduler(**scheduler), [0.9, 0.5, 0.2]
    side = 16  # pixels that a token spans, in all three
    seq_len = size.height // side * (size.width // side)
    keys = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    stock.set_timesteps(sigmas=sigmas, mu=calculate_shift(seq_len, *(stock.config[k] for k in keys)))
    shift = backbone_for(configs, size).shifts()["image"]
    ours = [shift * s / (1 + (shift - 1) * s) for s in sigmas]
    torch.testing.assert_close(stock.sigmas[:-1], torch.tensor(ours))


def test_sizes(family):
    """The default is the pipeline's; a side that does not fit is refused by the knob's name."""
    name, module, folder, backbone = family
    pipe = getattr(diffusers, PIPELINES[name]).from_pretrained(folder, **dict.fromkeys(module.ABSENT))
    side = read_backbone(folder).latent_shapes()["image"][1]
    pixels = 1024 if name == "qwen_image21" else pipe.default_sample_size * pipe.vae_scale_factor
    assert side * pipe.vae_scale_factor == pixels
    channels, height, width = backbone.latent_shapes()["image"]
    wanted = backbone.size
    assert (height * pipe.vae_scale_factor, width * pipe.vae_scale_factor) == (wanted.height, wanted.width)
    for name in ("height", "width"):
        for bad in (wanted.height + pipe.vae_scale_factor, 0, -wanted.height):
            message = f"^{name} is {bad}; allowed are multiples of {2 * pipe.vae_scale_factor}$"
            with pytest.raises(ValueError, match=message):
                read_backbone(folder, Size(**{name: bad})).latent_shapes()


@pytest.mark.parametrize("name, changes", [
    ("flux", {"in_channels": 24, "out_channels": 16}), ("qwen_image", {"zero_cond_t": True}),
    ("qwen_image", {"use_additional_t_cond": True}), ("qwen_image", {"guidance_embeds": True}),
])  # fmt: skip
def test_kin_that_needs_more_than_text_is_refused(name, changes):
    cls = {"flux": "FluxTransformer2DModel", "qwen_image": "QwenImageTransformer2DModel"}[name]
    config = {"_class_name": cls, "in_channels": 16, "out_channels": 16, **changes}
    with pytest.raises(ValueError, match="allowed is a .* text|without input pictures"):
        backbone_for({"transformer": config})


def test_a_flux_without_embedded_guidance_is_guided_as_its_pipeline_does(tmp_path):
    family_flux.build(tmp_path, guidance_embeds=False)
    backbone = read_backbone(tmp_path, family_flux.SIZE)
    grid = Grid(6, {"image": 3.0})
    noise = torch.randn(2, *backbone.latent_shapes()["image"], generator=torch.Generator().manual_seed(0))
    state = initial({"image": noise}, grid)
    cond, row = family_flux.conditioning(2, 1), family_flux.conditioning(1, 9)
    policy = Unconditional(dict.fromkeys(backbone.columns, "empty_prompt"), {"empty_prompt": row})
    model = Velocity(load_transformer(tmp_path, torch.float32), backbone).eval()
    teacher = Teacher(model, backbone, grid, Guidance(3.0), policy)
    ours = endpoint(teacher.block(cond), state, grid, list(range(7)))["image"]
    sigmas = {"image": grid.sigma["image"][:-1].tolist()}
    uncond = {c: v.expand(2, *v.shape[1:]) for c, v in row.items()}
    stock = family_flux.stock(tmp_path, state, sigmas, cond, uncond, 3.0)["image"]
    assert (ours - stock).norm() <= 1e-4 * stock.norm()


@pytest.mark.parametrize("module", [family_qwen_image, family_qwen_image21])
def test_padding_of_text_changes_nothing(module, tmp_path):
    """More of it, none, and text that is all masked (what the policy ``zeros`` makes)."""
    module.build(tmp_path)
    backbone, transformer = read_backbone(tmp_path, module.SIZE), load_transformer(tmp_path, torch.float32)
    noise = torch.randn(1, *backbone.latent_shapes()["image"], generator=torch.Generator().manual_seed(0))
    embeds = module.conditioning(1, 1)["prompt_embeds"]  # [1, 7, E]

    def velocity(embeds, length):
        mask = (torch.arange(embeds.shape[1]) < length)[None].long()
        cond = {"prompt_embeds": embeds, "prompt_embeds_mask": mask}
        sigma = {"image": torch.tensor([0.7])}
        return backbone.forward(transformer, {"image": noise}, sigma, cond, {"image": 1})["image"]

    plain = velocity(embeds[:, :5], 5)
    torch.testing.assert_close(velocity(embeds, 5), plain)
    torch.testing.assert_close(velocity(torch.cat([embeds, embeds + 1], 1), 5), plain)
    assert (velocity(embeds, 7) - plain).abs().max() > 1e-4
    assert torch.isfinite(velocity(embeds, 0)).all()


def test_padded_text_does_not_move_the_picture_in_the_stock_pipeline(tmp_path):
    """Qwen-Image 2.1 counts text into the picture's position; a dataset's rows are padded, its pipeline's are not."""
    module = family_qwen_image21
    module.build(tmp_path / "teacher")
    backbone, grid = read_backbone(tmp_path / "teacher", module.SIZE), Grid(4, {"image": 2.0})
    cond = module.conditioning(1, 9)
    assert not cond["prompt_embeds_mask"].all()
    noise = torch.randn(1, *backbone.latent_shapes()["image"], generator=torch.Generator().manual_seed(0))
    state = initial({"image": noise}, grid)
    transformer = widen(load_transformer(tmp_path / "teacher", torch.float32), backbone, 4).eval()
    config = Config(teacher=str(tmp_path / "teacher"), pdd_steps=4, block_size_min=4, block_size_max=4)
    save_student(tmp_path / "student", backbone, transformer.state_dict(), contract(config, grid, backbone, 1, False))
    ours = endpoint(FusedStudent(transformer, backbone, grid).block(cond), state, grid, [0, 2, 4])["image"]

    def sampled(condition):
        pipe = load_student(tmp_path / "student", text_encoders=False)
        call = {**condition, **backbone.to_pipeline(state), **backbone.pipeline_arguments()}
        return backbone.from_pipeline(pipe(**call, num_inference_steps=2, output_type="latent")[0])["image"]

    torch.testing.assert_close(sampled(backbone.pipeline_condition(cond)), ours, rtol=1e-4, atol=1e-4)
    assert (sampled(cond) - ours).abs().max() > 1e-3
