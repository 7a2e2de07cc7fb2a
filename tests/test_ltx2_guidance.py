"""LTX-2's kinds of guidance against its stock pipeline: spatio-temporal, cross-modal and their rescaling."""

import json

import family_ltx2
import pytest
import torch
from conftest import REPO, lines
from datasets import Dataset

from pdd.backbones import backbone_for, read_backbone
from pdd.config import Guidance
from pdd.formats import load_transformer
from pdd.grid import Grid
from pdd.sampling import endpoint, initial
from pdd.student import Velocity
from pdd.teacher import Teacher, Unconditional, with_deviation

N = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("ltx2") / "teacher"
    family_ltx2.build(made)
    return made


def setting(folder):
    """(backbone, grid, state, condition, unconditional row, transformer); a clock of its own for each modality."""
    backbone, grid = read_backbone(folder, family_ltx2.SIZE), Grid(N, {"video": 3.0, "audio": 4.0})
    g = torch.Generator().manual_seed(5)
    noise = {m: torch.randn(2, *shape, generator=g) for m, shape in backbone.latent_shapes().items()}
    transformer = load_transformer(folder, torch.float32).eval()
    cond, row = family_ltx2.conditioning(2, 1), family_ltx2.conditioning(1, 9)
    return backbone, grid, initial(noise, grid), cond, row, transformer


STG = {"stg_scale": {"video": 1.5, "audio": 0.75}, "spatio_temporal_guidance_blocks": [1]}
KINDS = {
    "plain": {"teacher_guidance_scale": {"video": 4.5, "audio": 7.0}},
    "spatio-temporal": STG,
    "spatio-temporal, every block": {"stg_scale": 1.0, "spatio_temporal_guidance_blocks": [0, 1]},
    "cross-modal": {"modality_scale": {"video": 3.0, "audio": 2.0}},
    "cross-modal, rescaled": {"modality_scale": 3.0, "guidance_rescale_x0": {"video": 0.7, "audio": 0.4}},
    "all": {
        "teacher_guidance_scale": {"video": 4.5, "audio": 7.0}, **STG, "modality_scale": {"video": 3.0, "audio": 2.0},
        "guidance_rescale_x0": {"video": 0.7, "audio": 0.4},
    },
}  # fmt: skip
STOCK = {"teacher_guidance_scale": "guidance_scale", "guidance_rescale_x0": "guidance_rescale"}


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_teacher_walks_as_the_stock_pipeline(kind, batched, folder):
    backbone, grid, state, cond, row, transformer = setting(folder)
    backbone.batched_guidance = batched
    knobs = KINDS[kind]
    policy = Unconditional(dict.fromkeys(backbone.columns, "empty_prompt"), {"empty_prompt": row})
    forwards = []
    handle = transformer.register_forward_hook(lambda module, args, out: forwards.append(len(out[0])))
    teacher = Teacher(Velocity(transformer, backbone), backbone, grid, Guidance(**knobs), policy)
    ours = endpoint(teacher.block(cond), state, grid, list(range(N + 1)))
    handle.remove()
    predictions = 4 if kind == "all" else 2
    assert forwards == ([2 * predictions] * N if batched else [2] * predictions * N)
    assert all(not block._forward_pre_hooks for block in transformer.transformer_blocks)  # nothing stays on the module
    assert all(not block.video_to_audio_attn._forward_hooks for block in transformer.transformer_blocks)

    arguments = {}
    for knob, value in knobs.items():
        name = STOCK.get(knob, knob)
        named = value if isinstance(value, dict) else dict.fromkeys(backbone.modalities, value)
        arguments |= (
            {name: value} if knob.endswith("blocks") else {name: named["video"], f"audio_{name}": named["audio"]}
        )
    sigmas = {m: s[:-1].tolist() for m, s in grid.sigma.items()}
    uncond = {c: v.expand(2, *v.shape[1:]) for c, v in row.items()} if "teacher_guidance_scale" in knobs else None
    stock = family_ltx2.stock(folder, state, sigmas, cond, uncond, **arguments)
    plain = family_ltx2.stock(folder, state, sigmas, cond)
    for m in ours:
        error = (ours[m] - stock[m]).norm()
        assert error <= 1e-4 * stock[m].norm(), m
        assert error <= 1e-2 * (plain[m] - stock[m]).norm(), m  # and little beside what guidance does


def test_rescaling_changes_nothing_where_no_noise_is_left():
    """A rule of higher order asks for the velocity at noise level 0, where a clean prediction says nothing of it."""
    g = torch.Generator().manual_seed(0)
    guided, plain, state = (torch.randn(2, 3, 4, generator=g) for _ in range(3))
    rescaled = with_deviation(guided, plain, state, torch.tensor([0.0, 0.5]), 1.0)
    assert torch.equal(rescaled[0], guided[0])
    clean = state - 0.5 * rescaled
    torch.testing.assert_close(clean[1].std(), (state - 0.5 * plain)[1].std())


COUNT = """
import json, os
from pdd.student import Velocity
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator
calls, forward, invalidate = [], Velocity.forward, Coordinator._invalidate_trace
def note(call):
    calls.append(call)
    with open({path!r} + os.environ["RANK"], "w") as file: json.dump(calls, file)
def counted(self, state, sigma, cond, plans=None, perturbations=()):
    note([plans is not None, len(state["video"]), len(perturbations)])
    return forward(self, state, sigma, cond, plans, perturbations)
def invalidated(self):
    note("invalidated")
    invalidate(self)
Velocity.forward, Coordinator._invalidate_trace = counted, invalidated
"""


def test_every_rank_issues_the_same_forwards(folder, warm, tmp_path):
    """Under ZeRO-3 in bfloat16 with the recipe's guidance: one forward of all predictions, and the same modules in it."""
    cond = {c: torch.cat([v, w]) for (c, v), w in zip(family_ltx2.conditioning(1, 1).items(),
                                                       family_ltx2.conditioning(1, 9).values())}  # fmt: skip
    rows = {"prompt": ["a thing", ""], **{c: v.tolist() for c, v in cond.items()}}
    Dataset.from_dict(rows).save_to_disk(str(tmp_path / "data"))
    ds_config = json.loads((REPO / "ds_configs" / "zero3.json").read_text()) | {"bf16": {"enabled": True}}
    ds_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    (tmp_path / "ds.json").write_text(json.dumps(ds_config))
    size = [f"--{name}={value}" for name, value in vars(family_ltx2.SIZE).items()]
    run = tmp_path / "run"
    code, output = warm(
        "train", "--ds_config", tmp_path / "ds.json", "--recipe", REPO / "recipes" / "ltx2.yaml", "--run", run,
        "--teacher", folder, "--data", tmp_path / "data", *size, "--gradient_accumulation_steps", "1",
        "--cfg_uncond", "empty_prompt", "--max_train_steps", "4", "--spatio_temporal_guidance_blocks", "[1]",
        "--save_every", "0", "--validation_every", "0", "--log_every", "1",
        prelude=COUNT.format(path=str(tmp_path / "calls")), ranks=2,
    )  # fmt: skip
    assert code == 0, output
    calls = [json.loads((tmp_path / f"calls{rank}").read_text()) for rank in (0, 1)]
    assert calls[0] == calls[1]
    teacher = [i for i, call in enumerate(calls[0]) if call[0] is False]
    assert [calls[0][i] for i in teacher] == [[False, 4, 2]] * 4
    # ZeRO-3 meets the modules in the order that it knows, once the walk to staggered starts is behind
    assert "invalidated" not in calls[0][teacher[2] :]
    assert all(loss == loss for loss in lines(run, "loss"))


@pytest.mark.parametrize("name, knobs, message", [
    ("FluxTransformer2DModel", {"modality_scale": 2.0}, "modality_scale is 2.0; .* Flux has no such guidance"),
    ("FluxTransformer2DModel", {"stg_scale": 1.0}, "stg_scale is 1.0; .* Flux has no such guidance"),
    ("LTX2VideoTransformer3DModel", {"uncond_skip_layer": 3}, "uncond_skip_layer is 3; .* LTX2 has no such guidance"),
    ("LTX2VideoTransformer3DModel", {**STG, "spatio_temporal_guidance_blocks": [1, 48]}, "has 48; allowed are 0 to 47"),
    ("2.0", STG, "stg_scale is .* the transformer has perturbed_attn false"),
])  # fmt: skip
def test_guidance_that_a_family_does_not_have_is_refused(name, knobs, message):
    sides = dict.fromkeys(["patch_size", "patch_size_t", "audio_patch_size", "audio_patch_size_t"], 1)
    config = {
        "_class_name": "LTX2VideoTransformer3DModel",
        **sides,
        "caption_channels": 8,
        "use_prompt_embeddings": True,
    }
    config |= {"num_layers": 48, "perturbed_attn": name != "2.0"}
    config |= {"in_channels": 16} | ({} if name == "2.0" else {"_class_name": name})
    with pytest.raises(ValueError, match=message):
        backbone_for({"transformer": config}).weaker(Guidance(**knobs))
