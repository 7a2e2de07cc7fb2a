"""Every family of the registry against its stock pipeline, and through a real training run; a new one cannot skip this."""

import importlib
import json

import pytest
import torch
from conftest import REPO, lines, student_weights
from datasets import Dataset
from diffusers.models.embeddings import TimestepEmbedding

from pdd.backbones import REGISTRY, Size, read_backbone
from pdd.config import Config, Guidance
from pdd.engine import SharedTeacher
from pdd.formats import contract, load_transformer, read_student, save_adapters, save_student
from pdd.grid import Grid, partition
from pdd.lora import add_adapters, trained_parts
from pdd.pipeline import load_student
from pdd.sampling import endpoint, initial
from pdd.student import FusedStudent, Velocity, head_parameters, widen
from pdd.teacher import Teacher, Unconditional

MODULES = sorted({target.split(":")[0] for target in REGISTRY.values()})
N = 12


@pytest.fixture(scope="module", params=MODULES)
def family(request, tmp_path_factory):
    """(its test module, a checkpoint folder, its backbone)."""
    module = importlib.import_module(f"family_{request.param}")
    folder = tmp_path_factory.mktemp(request.param) / "teacher"
    module.build(folder)
    return module, folder, read_backbone(folder, getattr(module, "SIZE", None))  # SIZE: where the default is large


def setting(family, batch=2):
    """(grid, initial state, conditioning); modalities get different shifts so that they cannot be mixed up."""
    module, _, backbone = family
    grid = Grid(N, {m: 3.0 + i for i, m in enumerate(backbone.modalities)})
    g = torch.Generator().manual_seed(5)
    shapes = backbone.latent_shapes()
    noise = {m: torch.randn(getattr(module, "BATCH", batch), *shape, generator=g) for m, shape in shapes.items()}
    return grid, initial(noise, grid), module.conditioning(getattr(module, "BATCH", batch), 1)


def assert_close(ours, stock):
    assert ours.keys() == stock.keys()
    for m in ours:
        assert ours[m].shape == stock[m].shape
        assert (ours[m] - stock[m]).norm() <= 1e-4 * stock[m].norm(), m


@pytest.mark.parametrize("steps", [3, N])
def test_a_new_student_samples_as_the_stock_pipeline(family, steps):
    """K blocks of a student at initialisation are K Euler steps: sign, time, layout and scale must all be right."""
    module, folder, backbone = family
    grid, state, cond = setting(family)
    transformer = widen(load_transformer(folder, torch.float32), backbone, N).eval()
    nodes = partition(N, steps)
    ours = endpoint(FusedStudent(transformer, backbone, grid).block(cond), state, grid, nodes)
    sigmas = {m: s[nodes[:-1]].tolist() for m, s in grid.sigma.items()}
    stock = module.stock(folder, state, sigmas, cond)
    assert_close(ours, stock)
    moved = [(stock[m] - state[m]).norm() / state[m].norm() for m in stock]
    assert min(moved) > 1e-2  # a transformer that predicts nothing would make any two samplers agree


def test_the_guided_teacher_walks_as_the_stock_pipeline(family):
    module, folder, backbone = family
    if getattr(module, "NO_GUIDANCE", False):
        with pytest.raises(ValueError, match="teacher_guidance_scale"):
            backbone.weaker(Guidance(3.0))
        return
    grid, state, cond = setting(family)
    uncond = module.conditioning(1, 9)
    rows = {"empty_prompt": uncond}
    policy = Unconditional(dict.fromkeys(backbone.columns, "empty_prompt"), rows)
    model = Velocity(load_transformer(folder, torch.float32), backbone).eval()
    rescale = getattr(module, "RESCALED", False)  # pipelines that always rescale the guided velocity
    teacher = Teacher(model, backbone, grid, Guidance(3.0, guidance_rescale=rescale), policy)
    ours = endpoint(teacher.block(cond), state, grid, list(range(N + 1)))
    sigmas = {m: s[:-1].tolist() for m, s in grid.sigma.items()}
    expanded = {c: v.expand(len(cond[c]), *v.shape[1:]) for c, v in uncond.items()}
    stock = module.stock(folder, state, sigmas, cond, expanded, 3.0)
    assert_close(ours, stock)
    plain = module.stock(folder, state, sigmas, cond)
    assert min((stock[m] - plain[m]).norm() / plain[m].norm() for m in stock) > 1e-3  # guidance does something


def test_directions_do_not_mix_with_channels_or_patches(family):
    """Every head of a random bank, one by one, is what the base transformer gives with that head in place."""
    _, folder, backbone = family
    grid, state, cond = setting(family)
    transformer = widen(load_transformer(folder, torch.float32), backbone, N).eval()
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in head_parameters(transformer):
            p.copy_(torch.randn(p.shape, generator=g) * p.std() + p)
    batch = len(next(iter(state.values())))
    model, heads = Velocity(transformer, backbone), [2, 7, 11]
    sigma = {m: s[0].float().expand(batch) for m, s in grid.sigma.items()}
    plans = grid.plan([0] * batch, [[4, 9]] * batch, [heads] * batch)
    out = model(state, sigma, cond, plans)
    fused = FusedStudent(transformer, backbone, grid)
    for i, k in enumerate(heads):
        for m, head in backbone.heads.items():
            transformer.set_submodule(head.module, fused.banks[m].fuse(grid.fused_plan(k, k + 1)[m]))
        alone = model(state, sigma, cond)
        for m in out:
            torch.testing.assert_close(out[m][:, 2 + i], alone[m][:, 0], rtol=1e-4, atol=1e-5)


def test_a_trained_student_samples_in_the_stock_pipeline_as_our_walk(family, tmp_path):
    """Saved, read back and called as a user does; its heads are no longer the teacher's."""
    module, folder, backbone = family
    grid, state, cond = setting(family)
    if not getattr(module, "OWN_CLOCKS", False):
        grid = Grid(N, dict.fromkeys(backbone.modalities, 3.0))  # most stock pipelines step all modalities alike
    transformer = widen(load_transformer(folder, torch.float32), backbone, N).eval()
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in head_parameters(transformer):
            p.add_(torch.randn(p.shape, generator=g) * p.std() * 0.3)
    config = Config(teacher=str(folder), pdd_steps=N, block_size_min=N, block_size_max=N)
    save_student(tmp_path, backbone, transformer.state_dict(), contract(config, grid, backbone, 1, False))
    nodes = partition(N, 3)
    ours = endpoint(FusedStudent(transformer, backbone, grid).block(cond), state, grid, nodes)
    pipe = load_student(tmp_path, text_encoders=False)
    made = pipe(
        **backbone.pipeline_condition(cond),
        **backbone.to_pipeline(state),
        **backbone.pipeline_arguments(),
        num_inference_steps=3,
        output_type="latent",
    )
    theirs = backbone.from_pipeline(made if len(backbone.modalities) > 1 else made[0])
    assert_close(theirs, ours)


def test_noise_that_the_pipeline_draws_starts_at_the_grid_s_first_noise_level(family, tmp_path):
    module, folder, backbone = family
    if not backbone.batched:
        pytest.skip("its pipeline is written here, and draws in one line")
    cond, first = module.conditioning(1, 1), {}
    for max_t in (1.0, 0.6):
        grid = Grid(N, dict.fromkeys(backbone.modalities, 3.0), max_t)
        transformer = widen(load_transformer(folder, torch.float32), backbone, N)
        config = Config(teacher=str(folder), pdd_steps=N, block_size_min=N, block_size_max=N, grid_max_t=max_t)
        student = tmp_path / str(max_t)
        save_student(student, backbone, transformer.state_dict(), contract(config, grid, backbone, 1, False))
        pipe = load_student(student, text_encoders=False)
        seen = first.setdefault(max_t, [])
        pipe.transformer.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
        arguments = {**backbone.pipeline_condition(cond), **backbone.pipeline_arguments()}
        pipe(**arguments, num_inference_steps=1, output_type="latent", generator=torch.Generator().manual_seed(3))
    whole, part = first[1.0][0], first[0.6][0]
    names = ("hidden_states", "audio_hidden_states")[: len(backbone.modalities)]
    for name in names:
        torch.testing.assert_close(part[name], 0.6 * whole[name])


def embedded_times(transformer):
    """A list that gets what every time embedding of a transformer reads, ``[rows, 256]`` each."""
    seen = []
    for module in transformer.modules():
        if isinstance(module, TimestepEmbedding):
            module.register_forward_pre_hook(lambda _, args: seen.append(args[0].double()))
    return seen


def assert_times_are_float32_s(rounded, exact):
    """Up to the rounding of the sines and cosines, which are numbers up to 1."""
    assert len(rounded) == len(exact) > 0
    for ours, theirs in zip(rounded, exact):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2**-8)


def test_time_is_not_rounded_in_bfloat16(family):
    """Noise levels that are one bfloat16 number, in teacher and student alike."""
    module, folder, backbone = family
    sigma = torch.tensor([0.9985, 0.9995])
    assert sigma[0].bfloat16() == sigma[1].bfloat16()
    cond = {c: v[:1].expand(2, *v.shape[1:]) for c, v in module.conditioning(2, 1).items()}
    g = torch.Generator().manual_seed(0)
    state = {m: torch.randn(1, *shape, generator=g).expand(2, *shape) for m, shape in backbone.latent_shapes().items()}
    seen = {}
    for dtype in (torch.float32, torch.bfloat16):
        transformer = load_transformer(folder, dtype)
        seen[dtype] = embedded_times(transformer)
        with torch.no_grad():
            v = Velocity(transformer, backbone)(state, dict.fromkeys(state, sigma), cond)
    assert_times_are_float32_s(seen[torch.bfloat16], seen[torch.float32])
    times = seen[torch.float32]
    half = len(times) // 2
    pairs = [(t[0], t[1]) for t in times] if backbone.batched else zip(times[:half], times[half:])  # of the two samples
    # waves of 1000 sigma, or sigma itself
    assert max((a - b).abs().max() for a, b in pairs) > (0.1 if backbone.batched else 5e-4)
    assert all(not torch.equal(x[0], x[1]) for x in v.values())


def test_the_stock_pipeline_samples_a_bfloat16_student_at_unrounded_times(family, tmp_path):
    """As it was trained. Some pipelines round the time to the latents' precision before the transformer sees it."""
    module, folder, backbone = family
    _, state, cond = setting(family)
    grid = Grid(N, dict.fromkeys(backbone.modalities, 3.0))
    transformer = widen(load_transformer(folder, torch.float32), backbone, N)
    config = Config(teacher=str(folder), pdd_steps=N, block_size_min=N, block_size_max=N)
    save_student(tmp_path, backbone, transformer.state_dict(), contract(config, grid, backbone, 1, False))
    seen = {}
    for dtype in (torch.float32, torch.bfloat16):
        pipe = load_student(tmp_path, text_encoders=False, dtype=dtype)
        seen[dtype] = embedded_times(pipe.transformer)
        half = {c: v.to(dtype) if v.is_floating_point() else v for c, v in cond.items()}
        call = {**backbone.pipeline_condition(half), **backbone.to_pipeline(state), **backbone.pipeline_arguments()}
        pipe(**call, num_inference_steps=5, output_type="latent")
    assert_times_are_float32_s(seen[torch.bfloat16], seen[torch.float32])


# linears of the blocks that make no attention and no feed-forward: modulation and gates
OTHERS = ("norm", "_mod.", "to_gate_logits", "adaln")


def test_adapters_share_a_backbone_with_the_teacher(family, tmp_path):
    """Teacher and student at once, gradients where they belong, and the file that plain Diffusers loads."""
    module, folder, backbone = family
    grid, state, cond = setting(family)
    stock = load_transformer(folder, torch.float32).eval()
    transformer = widen(load_transformer(folder, torch.float32), backbone, N, keep_base=True)
    add_adapters(transformer, backbone, "", rank=3, alpha=6, seed=1)
    model = Velocity(transformer, backbone)
    adapted = {n.removesuffix(".lora_A") for n, m in transformer.named_modules() if n.endswith(".lora_A")}
    heads = {head.module for head in backbone.heads.values()}
    in_blocks = {n for n, m in stock.named_modules() if isinstance(m, torch.nn.Linear) and "blocks." in n}
    assert adapted == {n for n in in_blocks if not any(other in n for other in OTHERS)} and not adapted & heads
    trained = {n for n, p in transformer.named_parameters() if p.requires_grad}
    assert trained == {n for n in dict(transformer.named_parameters()) if ".lora_" in n or ".bank." in n}

    batch, heads = len(next(iter(state.values()))), [2, 7]
    sigma = {m: s[0].float().expand(batch) for m, s in grid.sigma.items()}
    plans = grid.plan([0] * batch, [[4]] * batch, [heads] * batch)
    with torch.no_grad():
        plain = Velocity(stock, backbone)(state, sigma, cond)
        new = model(state, sigma, cond, plans)
    for m in plain:  # at once the student is its teacher
        torch.testing.assert_close(new[m][:, 1:], plain[m].expand_as(new[m][:, 1:]), rtol=1e-5, atol=1e-5)
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in transformer.named_parameters():
            if "lora_B" in name or ".bank." in name:
                p.add_(0.3 * torch.randn(p.shape, generator=g))
    shared = SharedTeacher(model)
    for m, v in shared(state, sigma, cond).items():
        assert torch.equal(v, plain[m]), m

    grads = {}
    for checkpointing in (False, True):
        if checkpointing:
            transformer.enable_gradient_checkpointing()
        transformer.zero_grad()
        student = model(state, sigma, cond, plans)
        shared(state, sigma, cond)  # the teacher runs between a student's forward and its backward
        sum(v[:, 1:].square().mean() for v in student.values()).backward()
        grads[checkpointing] = {n: p.grad for n, p in transformer.named_parameters() if p.grad is not None}
    assert grads[True].keys() == grads[False].keys() <= trained
    # a last block may make a text stream that nothing reads
    assert len(grads[True]) > 0.8 * len(trained) and {n for n in trained if ".bank." in n} <= grads[True].keys()
    for name, grad in grads[True].items():
        torch.testing.assert_close(grad, grads[False][name], rtol=1e-4, atol=1e-6)

    config = Config(teacher=str(folder), pdd_steps=N, block_size_min=N, block_size_max=N, lora_rank=3, lora_alpha=6)
    weights = {n: p.detach() for n, p in transformer.named_parameters() if p.requires_grad}
    parts = trained_parts(transformer, backbone, weights, "")
    save_adapters(tmp_path / "student", backbone, *parts, contract(config, grid, backbone, 1, False))
    loaded = read_student(tmp_path / "student")
    with torch.no_grad():
        merged = Velocity(loaded.transformer, loaded.backbone)(state, sigma, cond, plans)
        stock.load_lora_adapter(str(tmp_path / "student"), use_safetensors=True)
        by_diffusers = Velocity(stock, backbone)(state, sigma, cond)
        for head in backbone.heads.values():
            transformer.get_submodule(head.module).plan = None
        by_us = model(state, sigma, cond)
    for m in plain:
        torch.testing.assert_close(merged[m], student[m].detach(), rtol=1e-4, atol=1e-5)
        assert torch.equal(by_diffusers[m], by_us[m]), m  # its own head on our backbone
        assert not torch.allclose(by_us[m], plain[m], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rollout, more", [
    ("simulate", ["--gradient_checkpointing", "true"]), ("data_latent", ["--train_micro_batch_size_per_gpu", "1"]),
])  # fmt: skip
def test_a_family_trains_on_two_ranks_in_bf16_under_zero_3(family, rollout, more, warm, tmp_path):
    """The loss on a repeated batch falls, and only what is trained moves."""
    module, folder, backbone = family
    cond = module.conditioning(1, 1)
    rows = {"prompt": ["a thing"], **{c: v.tolist() for c, v in cond.items()}}
    g = torch.Generator().manual_seed(2)
    for m, shape in backbone.latent_shapes().items():
        rows[backbone.latent_columns[m]] = [torch.randn(shape, generator=g).tolist()]
    Dataset.from_dict(rows).save_to_disk(str(tmp_path / "data"))
    ds_config = json.loads((REPO / "ds_configs" / "zero3.json").read_text())
    ds_config["bf16"] = {"enabled": True}
    (tmp_path / "ds.json").write_text(json.dumps(ds_config))
    size = [f"--{name}={value}" for name, value in vars(backbone.size).items() if value is not None]
    code, output = warm(
        "train", "--ds_config", tmp_path / "ds.json", "--recipe", write(tmp_path / "recipe.yaml", f"teacher: {folder}"),
        "--data", tmp_path / "data", "--run", tmp_path / "run", "--pdd_steps", "4", "--block_size_min", "4",
        "--block_size_max", "4", "--rollout_mode", rollout, "--max_train_steps", "6", "--learning_rate", "2e-3",
        "--log_every", "1", "--export_dtype", "fp32", *size, *more, ranks=2,
    )  # fmt: skip
    assert code == 0, output
    losses = lines(tmp_path / "run", "loss")
    assert all(v == v and v < 1e6 for v in losses)
    assert sum(losses[-2:]) < sum(losses[:2])
    base = load_transformer(folder, torch.float32)
    widened = {h.module for h in backbone.heads.values()}
    buffers = {name for name, _ in base.named_buffers()}
    for name, weight in student_weights(tmp_path / "run").items():
        assert torch.isfinite(weight).all() and weight.numel() > 0, name
        if name in buffers:
            assert torch.equal(weight, base.state_dict()[name]), name  # float32 tables survive bf16 training
    assert any(name.startswith(tuple(widened)) for name in student_weights(tmp_path / "run"))


def test_a_dry_run_of_a_family(family, warm, tmp_path):
    """It runs the student on meta tensors; a text's mask must do so, too."""
    module, folder, backbone = family
    cond = {c: v[-1:].tolist() for c, v in module.conditioning(2, 1).items()}
    Dataset.from_dict({"prompt": ["a thing"], **cond}).save_to_disk(str(tmp_path / "data"))
    size = [f"--{name}={value}" for name, value in vars(backbone.size).items() if value is not None]
    code, output = warm(
        "train", "--ds_config", "ds_configs/zero3.json", "--recipe", write(tmp_path / "recipe.yaml", f"teacher: {folder}"),
        "--data", tmp_path / "data", "--pdd_steps", "4", "--block_size_min", "4", "--block_size_max", "4", *size,
        "--train_micro_batch_size_per_gpu", "2", "--dry_run", "8",
    )  # fmt: skip
    assert code == 0 and ("activations not counted" in " ".join(output.split())) != backbone.runs_on_meta, output


def write(path, text):
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["height", "width"])
def test_a_size_that_does_not_fit_is_refused_by_name(name, family):
    module, folder, _ = family
    size = Size(**{**vars(getattr(module, "SIZE", Size())), name: 1})
    with pytest.raises(ValueError, match=f"{name} is 1; allowed"):
        read_backbone(folder, size).latent_shapes()
