"""The block that the unconditional pass leaves out, against a transformer that does not have it."""

import copy

import family_minimax_h3
import family_wan
import pytest
import torch
from torch import nn

from pdd.backbones import read_backbone
from pdd.config import Guidance
from pdd.formats import load_transformer
from pdd.grid import Grid
from pdd.student import Velocity
from pdd.teacher import Teacher, Unconditional


@pytest.mark.parametrize("family, batched", [(family_wan, True), (family_wan, False), (family_minimax_h3, True)])
def test_the_unconditional_pass_is_that_of_a_transformer_without_the_block(family, batched, tmp_path):
    family.build(tmp_path)
    backbone, transformer = read_backbone(tmp_path, family.SIZE), load_transformer(tmp_path, torch.float32).eval()
    backbone.batched_guidance = batched
    grid = Grid(4, dict.fromkeys(backbone.modalities, 3.0))
    cond, empty = family.conditioning(2, 1), family.conditioning(1, 2)
    g = torch.Generator().manual_seed(0)
    state = {m: torch.randn(2, *shape, generator=g) for m, shape in backbone.latent_shapes().items()}
    u = torch.tensor([0.3, 0.8], dtype=torch.float64)
    uncond = Unconditional(dict.fromkeys(backbone.columns, "empty_prompt"), {"empty_prompt": empty})
    skipping = Teacher(Velocity(transformer, backbone), backbone, grid, Guidance(3.0, uncond_skip_layer=1), uncond)
    whole = Teacher(Velocity(transformer, backbone), backbone, grid, Guidance(3.0), uncond)
    with torch.no_grad():
        ours, plain = skipping.velocity(state, u, cond), whole.velocity(state, u, cond)
        short = copy.deepcopy(transformer)
        blocks = [block for i, block in enumerate(short.get_submodule(backbone.blocks)) if i != 1]
        short.set_submodule(backbone.blocks, nn.ModuleList(blocks))
        sigma = {m: schedule(u).float() for m, schedule in grid.schedules.items()}
        v_c = Velocity(transformer, backbone)(state, sigma, cond)
        v_u = Velocity(short, backbone)(state, sigma, uncond(cond))
    for m in state:
        c, n = v_c[m][:, 0], v_u[m][:, 0]
        torch.testing.assert_close(ours[m], n + 3 * (c - n), rtol=1e-4, atol=1e-5)
        assert (ours[m] - plain[m]).abs().max() > 1e-3  # the block does something
    assert not transformer.get_submodule(backbone.blocks)[1]._forward_hooks


def test_a_block_that_is_not_there_is_refused(tmp_path):
    family_wan.build(tmp_path)
    backbone = read_backbone(tmp_path)
    with pytest.raises(ValueError, match="uncond_skip_layer is 9; allowed are 0 to"):
        backbone.weaker(Guidance(uncond_skip_layer=9))
    backbone.weaker(Guidance(uncond_skip_layer=0))
