"""The metrics against closed forms and naive loops, and the embedded teacher against what it promises."""

import math
from pathlib import Path

import pytest
import torch
from datasets import load_from_disk
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file
from sklearn.datasets import load_digits

from pdd.metrics import diversity, endpoint_error, frechet_distance, load_features

TEACHER = Path(__file__).resolve().parent.parent / "assets" / "digits"
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
VAGUE = {"any digit": range(10), "an even digit": range(0, 10, 2), "an odd digit": range(1, 10, 2)}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def with_moments(mean: torch.Tensor, root: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """Samples ``[count, F]`` whose sample mean is ``mean`` and sample covariance ``root @ root.T``, exactly."""
    x = torch.randn(count, len(mean), generator=generator(seed), dtype=torch.float64)
    x = x - x.mean(0)
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(x.T @ x / (count - 1)), x.T, upper=False).T
    return white @ root.T + mean


# ---------------------------------------------------------------------------------------------------- Frechet


@pytest.mark.parametrize("smallest, accuracy", [(0.05, 1e-9), (0.0, 1e-7)])
def test_frechet_of_commuting_gaussians_is_the_closed_form(smallest, accuracy):
    """Covariances with shared eigenvectors: |difference of means|^2 + sum of (difference of deviations)^2.

    A singular covariance costs half of the digits: the root of a rounding error of 1e-16 is 1e-8.
    """
    rotation = torch.linalg.qr(torch.randn(5, 5, generator=generator(), dtype=torch.float64))[0]
    s, t = torch.tensor([[smallest, 0.5, 1.0, 2.0, 3.0], [1.0, 0.25, 1.5, 0.1, 4.0]], dtype=torch.float64)
    mean = torch.linspace(-1, 1, 5, dtype=torch.float64)
    a = with_moments(torch.zeros_like(mean), rotation @ s.diag(), 60, 1)
    b = with_moments(mean, rotation @ t.diag(), 40, 2)
    expected = mean.square().sum() + (s - t).square().sum()
    assert frechet_distance(a, b) == pytest.approx(float(expected), rel=accuracy)


def test_frechet_of_two_dimensional_gaussians_that_do_not_commute():
    """In two dimensions trace(M^1/2) = sqrt(trace M + 2 sqrt(det M)), here of M = S_a S_b."""
    root_a = torch.tensor([[2.0, 0.0], [1.0, 0.5]], dtype=torch.float64)
    root_b = torch.tensor([[0.3, -1.0], [0.7, 1.2]], dtype=torch.float64)
    mean = torch.tensor([0.5, -2.0], dtype=torch.float64)
    a, b = with_moments(mean, root_a, 50, 3), with_moments(-mean, root_b, 70, 4)
    cov_a, cov_b = root_a @ root_a.T, root_b @ root_b.T
    assert not torch.allclose(cov_a @ cov_b, cov_b @ cov_a)
    product = cov_a @ cov_b
    cross = math.sqrt(product.trace() + 2 * math.sqrt(torch.linalg.det(product)))
    expected = 4 * mean.square().sum() + cov_a.trace() + cov_b.trace() - 2 * cross
    assert frechet_distance(a, b) == pytest.approx(float(expected), rel=1e-9)


def test_frechet_is_symmetric_and_zero_on_itself():
    a, b = torch.randn(200, 8, generator=generator(5)), torch.rand(150, 8, generator=generator(6))
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-9)
    assert frechet_distance(a, b) > 1
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-6)
    assert frechet_distance(a[:5], a[:5]) == pytest.approx(0, abs=1e-6), "a covariance of low rank"


@pytest.mark.parametrize(("a", "b"), [((1, 3), (5, 3)), ((5, 3), (5, 4)), ((5,), (5,))])
def test_frechet_refuses_what_has_no_moments(a, b):
    with pytest.raises(ValueError, match="frechet_distance compares"):
        frechet_distance(torch.zeros(a), torch.zeros(b))


# ---------------------------------------------------------------------------------------------------- the others


def test_diversity_is_the_mean_over_distinct_pairs():
    x = torch.randn(17, 6, generator=generator(7))
    pairs = [(x[i] - x[j]).norm().item() for i in range(17) for j in range(17) if i != j]
    assert diversity(x) == pytest.approx(sum(pairs) / len(pairs), rel=1e-6)
    assert diversity(x[:1].expand(4, 6)) == 0, "a collapsed model has no diversity"
    with pytest.raises(ValueError, match="n >= 2"):
        diversity(x[:1])


def test_endpoint_error_has_one_norm_for_the_batch():
    reference = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert endpoint_error(reference, reference) == 0
    assert endpoint_error(torch.zeros(2, 2), reference) == 1
    # |(0, 0), (0, 2)| / |(3, 0), (0, 4)|; a mean of per-sample errors would be 0.25
    assert endpoint_error(torch.tensor([[3.0, 0.0], [0.0, 2.0]]), reference) == pytest.approx(2 / 5)
    with pytest.raises(ValueError, match="equal shapes"):
        endpoint_error(reference[:1], reference)


# ---------------------------------------------------------------------------------------------------- the features


@pytest.fixture(scope="module")
def features():
    return load_features(TEACHER)


@pytest.fixture(scope="module")
def real():
    """scikit-learn's digits, independently of what is stored: images ``[n, 1, 8, 8]`` in [-1, 1], labels ``[n]``."""
    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1, torch.tensor(data.target)


def test_classifier_knows_the_real_digits(features, real):
    net, _ = features
    images, labels = real
    assert (net(images).argmax(1) == labels).float().mean() > 0.98
    assert not any(p.requires_grad for p in net.parameters()) and not net.training
    # mirrored digits are not digits: a classifier that ignored the picture would not care
    assert (net(images.flip(-1)).argmax(1) == labels).float().mean() < 0.7


def test_reference_holds_the_real_digits_of_each_prompt(features, real):
    net, reference = features
    images, labels = real
    for digit, word in enumerate(WORDS):
        torch.testing.assert_close(reference[word], net.features(images[labels == digit]), rtol=1e-4, atol=1e-4)
    for prompt, digits in VAGUE.items():
        union = torch.cat([reference[WORDS[digit]] for digit in digits])  # the same rows, in another order
        assert len(reference[prompt]) == len(union)
        torch.testing.assert_close(reference[prompt].sort(0).values, union.sort(0).values)
    assert len(reference["any digit"]) == len(reference[""]) == 1797


def test_a_teacher_without_features_has_no_metrics(tmp_path):
    assert load_features(tmp_path) is None


def test_frechet_tells_digits_apart(features):
    _, reference = features
    even, odd = reference["an even digit"], reference["an odd digit"]
    assert frechet_distance(even[::2], even[1::2]) < 0.1 * frechet_distance(even, odd)


# ---------------------------------------------------------------------------------------------------- the teacher


@pytest.fixture(scope="module")
def conditioning():
    return load_from_disk(str(TEACHER / "conditioning")).with_format("torch")


def test_conditioning_has_a_row_for_every_prompt(conditioning):
    assert sorted(conditioning["prompt"]) == sorted(["", *WORDS, *VAGUE])
    for row in conditioning:
        assert row["prompt_embeds"].shape == (1, 32) and row["prompt_embeds"].dtype == torch.float32
        assert row["pooled_prompt_embeds"].shape == (32,) and row["pooled_prompt_embeds"].dtype == torch.float32
    pooled = conditioning["pooled_prompt_embeds"][:]  # [14, 32]
    assert torch.pdist(pooled).min() > 0.1, "no two prompts share a row"


def test_latents_are_the_digits_with_a_caption_that_fits(conditioning, real):
    latents = load_from_disk(str(TEACHER / "latents")).with_format("torch")
    rows = {row["prompt"]: row for row in conditioning}
    images, labels = real
    torch.testing.assert_close(latents["latents"][:], images)
    captions = latents["prompt"][:]
    allowed = {word: {digit} for digit, word in enumerate(WORDS)} | {p: set(d) for p, d in VAGUE.items()}
    assert all(label in allowed[prompt] for prompt, label in zip(captions, labels.tolist()))
    assert 0.2 < sum(prompt == "any digit" for prompt in captions) / len(captions) < 0.5
    expected = torch.stack([rows[prompt]["pooled_prompt_embeds"] for prompt in captions])  # [n, 32]
    assert torch.equal(latents["pooled_prompt_embeds"][:], expected)
    assert torch.equal(latents["prompt_embeds"][:], expected[:, None])


def test_the_pipeline_is_an_euler_loop_from_noise_to_digits(conditioning, features):
    absent = ["vae", "text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3"]
    pipeline = StableDiffusion3Pipeline.from_pretrained(TEACHER, **dict.fromkeys(absent))
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline.scheduler.config.shift == 1.0

    words = [row for row in conditioning if row["prompt"] in WORDS]
    prompt_embeds = torch.stack([row["prompt_embeds"] for row in words]).repeat(4, 1, 1)  # [40, 1, 32]
    pooled = torch.stack([row["pooled_prompt_embeds"] for row in words]).repeat(4, 1)  # [40, 32]
    noise = torch.randn(40, 1, 8, 8, generator=generator(8))  # [40, 1, 8, 8]
    latents = pipeline(
        prompt_embeds=prompt_embeds,
        pooled_prompt_embeds=pooled,
        latents=noise,
        guidance_scale=1,
        num_inference_steps=16,
        output_type="latent",
    ).images

    sigmas = pipeline.scheduler.sigmas  # [17], 1 .. 0
    assert sigmas[0] == 1 and sigmas[-1] == 0 and len(sigmas) == 17
    x = noise
    with torch.no_grad():
        for sigma, following in zip(sigmas[:-1], sigmas[1:]):
            velocity = pipeline.transformer(
                hidden_states=x,
                timestep=(1000 * sigma).expand(len(x)),
                encoder_hidden_states=prompt_embeds,
                pooled_projections=pooled,
                return_dict=False,
            )[0]
            x = x + (following - sigma) * velocity
    torch.testing.assert_close(latents, x, rtol=1e-4, atol=1e-4)

    net, _ = features
    asked = torch.tensor([WORDS.index(row["prompt"]) for row in words]).repeat(4)
    assert (net(x).argmax(1) == asked).float().mean() > 0.8


def test_weights_are_half_precision_and_the_folder_is_small():
    weights = load_file(TEACHER / "transformer" / "diffusion_pytorch_model.safetensors")
    assert {w.dtype for w in weights.values()} == {torch.float16}
    assert sum(f.stat().st_size for f in TEACHER.rglob("*") if f.is_file()) < 2.5e6
