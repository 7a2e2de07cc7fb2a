"""What the embedded digits are measured with: a feature space, Frechet distance, diversity, endpoint error.

Torch and safetensors only, so that validation inside a training run needs nothing else. The feature space is a
teacher folder's own affair: one without ``features/`` simply has no Frechet distance and no diversity.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn


class FeatureNet(nn.Module):
    """A small digit classifier whose penultimate layer is the space that pictures are compared in.

    Args:
        channels: width of the first convolution; the second has twice as many channels.
        width: F, the number of features.
        num_classes: number of digits.
    """

    def __init__(self, channels: int = 16, width: int = 32, num_classes: int = 10):
        super().__init__()
        self.conv1 = nn.Conv2d(1, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, padding=1, stride=2)
        self.project = nn.Linear(2 * channels * 16, width)
        # standardised features: distances are in standard deviations of the digits it was trained on
        self.norm = nn.BatchNorm1d(width, affine=False)
        self.classify = nn.Linear(width, num_classes)

    def features(self, images: Tensor) -> Tensor:
        """Features ``[B, F]`` of pictures ``[B, 1, 8, 8]`` in [-1, 1], about zero mean and unit variance on digits."""
        hidden = nn.functional.gelu(self.conv1(images))  # [B, C, 8, 8]
        hidden = nn.functional.gelu(self.conv2(hidden))  # [B, 2C, 4, 4]
        return self.norm(self.project(hidden.flatten(1)))  # [B, F]

    def forward(self, images: Tensor) -> Tensor:
        """Class logits ``[B, num_classes]`` of pictures ``[B, 1, 8, 8]``."""
        return self.classify(nn.functional.gelu(self.features(images)))


def load_features(teacher_dir: str | Path) -> tuple[FeatureNet, dict[str, Tensor]] | None:
    """The feature space that a teacher folder brings along.

    Args:
        teacher_dir: folder of the teacher; ``features/`` in it holds the classifier and the real pictures' features.

    Returns:
        The classifier in evaluation mode, and prompt -> features ``[n, F]`` of the real pictures which that prompt
        may show: the union of its classes, so "an even digit" has those of five. None without ``features/``.

    Raises:
        FileNotFoundError: ``features/`` is there, but one of its three files is not.
    """
    folder = Path(teacher_dir) / "features"
    if not folder.is_dir():
        return None
    config = json.loads((folder / "config.json").read_text())
    net = FeatureNet(config["channels"], config["width"], config["num_classes"])
    net.load_state_dict(load_file(folder / "model.safetensors"))
    real = load_file(folder / "reference.safetensors")  # features [n, F], labels [n]
    labels = real["labels"].long()
    reference = {
        prompt: real["features"][torch.isin(labels, torch.tensor(classes))]
        for prompt, classes in config["prompts"].items()
    }
    return net.eval().requires_grad_(False), reference


def vague_prompts(teacher_dir: str | Path) -> list[str]:
    """Prompts of a teacher folder that more than one class answers; empty without ``features/``."""
    config = Path(teacher_dir) / "features" / "config.json"
    if not config.exists():
        return []
    prompts = json.loads(config.read_text())["prompts"]
    return [prompt for prompt, classes in prompts.items() if prompt and len(classes) > 1]


def frechet_distance(a: Tensor, b: Tensor) -> float:
    """Frechet distance between the Gaussians fitted to two sets of features.

    ``|mean_a - mean_b|^2 + trace(S_a + S_b - 2 (S_a^1/2 S_b S_a^1/2)^1/2)``, in float64. The square root is taken of
    symmetric matrices only, so that it stays real where the usual root of ``S_a S_b`` turns complex.

    Args:
        a: features ``[n, F]``.
        b: features ``[m, F]``. Few samples inflate the distance, so compare only distances of equal counts.

    Returns:
        The distance in squared feature units: 0 for equal moments. Rounding may leave about 1e-10 either side of 0.

    Raises:
        ValueError: not two matrices of equal width, or one has fewer than two rows, which have no covariance.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or min(len(a), len(b)) < 2:
        raise ValueError(
            f"frechet_distance compares features [n >= 2, F] and [m >= 2, F], not {list(a.shape)} and {list(b.shape)}"
        )
    (mean_a, cov_a), (mean_b, cov_b) = _moments(a), _moments(b)
    root = _symmetric_root(cov_a)  # [F, F]
    # the trace of a root is the sum of the roots of the eigenvalues: no second root is ever built
    cross = torch.linalg.eigvalsh(_symmetric(root @ cov_b @ root)).clamp(min=0).sqrt().sum()
    return float((mean_a - mean_b).square().sum() + cov_a.trace() + cov_b.trace() - 2 * cross)


def diversity(features: Tensor) -> float:
    """Mean Euclidean distance over all pairs of distinct samples, in feature units.

    Args:
        features: ``[n, F]``, of samples of one prompt; compared with the teacher's, it shows a collapse.

    Raises:
        ValueError: fewer than two samples.
    """
    if features.ndim != 2 or len(features) < 2:
        raise ValueError(f"diversity needs features [n >= 2, F], not {list(features.shape)}")
    return float(torch.pdist(features.double()).mean())


def precision_recall(samples: Tensor, reference: Tensor, neighbours: int = 3) -> tuple[float, float]:
    """Improved precision and recall (Kynkaanniemi et al., arXiv:1904.06991).

    A set's manifold is the union of balls around its points that reach to each one's k-th nearest neighbour in the set.
    Precision is the share of samples on the reference's manifold, recall the share of the reference on the samples'.

    Args:
        samples, reference: features ``[n, F]`` and ``[m, F]``; equal counts, or the smaller set's balls are the larger.
        neighbours: k.

    Raises:
        ValueError: a set with no k-th neighbour, or sets of different width.
    """
    if samples.ndim != 2 or reference.ndim != 2 or samples.shape[1] != reference.shape[1]:
        raise ValueError(
            f"precision_recall compares features [n, F], not {list(samples.shape)}, {list(reference.shape)}"
        )
    if min(len(samples), len(reference)) <= neighbours:
        raise ValueError(
            f"precision_recall needs more than {neighbours} points a set, not {len(samples)}, {len(reference)}"
        )

    def covered(points: Tensor, of: Tensor) -> float:
        # column 0 of a set's sorted distances to itself is the point itself
        radius = _distances(of, of).kthvalue(neighbours + 1, 1).values  # [m]
        return float((_distances(points, of) <= radius).any(1).double().mean())

    return covered(samples, reference), covered(reference, samples)


def endpoint_error(x: Tensor, reference: Tensor) -> float:
    """Relative L2 error ``|x - reference| / |reference|``, one norm over the whole batch; 0 is exact.

    Args:
        x: samples ``[B, ...]``.
        reference: the teacher's fine-step endpoints from the same noise, of the same shape.

    Raises:
        ValueError: the shapes differ (a broadcast would compare the wrong samples silently).
    """
    if x.shape != reference.shape:
        raise ValueError(f"endpoint_error compares equal shapes, not {list(x.shape)} and {list(reference.shape)}")
    x, reference = x.double(), reference.double()
    return float((x - reference).norm() / reference.norm())


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """Distances ``[n, m]``, without the shortcut over inner products: it would not give 0 for equal points."""
    return torch.cdist(a.double(), b.double(), compute_mode="donot_use_mm_for_euclid_dist")


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean ``[F]`` and unbiased covariance ``[F, F]`` in float64."""
    features = features.double()
    mean = features.mean(0)  # [F]
    centred = features - mean  # [n, F]
    return mean, centred.T @ centred / (len(features) - 1)


def _symmetric(matrix: Tensor) -> Tensor:
    """The symmetric part; rounding alone makes a product of symmetric matrices lopsided."""
    return (matrix + matrix.T) / 2


def _symmetric_root(matrix: Tensor) -> Tensor:
    """Square root of a symmetric positive semi-definite matrix; negative rounding in its spectrum counts as 0."""
    values, vectors = torch.linalg.eigh(_symmetric(matrix))
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.T
