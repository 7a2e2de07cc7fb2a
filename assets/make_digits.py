"""Train the embedded default teacher and write everything under ``assets/digits/``.

    python assets/make_digits.py                    # about 3 minutes on one CPU core
    python assets/make_digits.py --out /some/folder --steps 1000

A real Diffusers ``SD3Transformer2DModel``, only tiny: it learns the 8x8 digits of scikit-learn, prompted by "zero" ..
"nine" and by the vague "any digit", "an even digit", "an odd digit". Under a vague prompt one noise must decide which
digit it becomes, so the teacher's trajectories bend and few plain Euler steps miss: that is what a student is for.

What it writes is listed in the model card at the end of this file, which is written too.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset, Features, List, Value
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # started as a script, Python looks in assets/ only
from pdd.metrics import FeatureNet, diversity, frechet_distance, load_features  # noqa: E402

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
VAGUE = ["any digit", "an even digit", "an odd digit"]
PROMPTS = ["", *DIGITS, *VAGUE]  # the row number in the conditioning table
CLASSES = {  # prompt -> the digits it may show
    "": list(range(10)),
    **{word: [digit] for digit, word in enumerate(DIGITS)},
    "any digit": list(range(10)),
    "an even digit": [0, 2, 4, 6, 8],
    "an odd digit": [1, 3, 5, 7, 9],
}
WIDTH = 32  # width of a conditioning row
DROP = 0.1  # share of captions replaced by "", so that guidance is possible


# ---------------------------------------------------------------------------------------------------- data


def digits() -> tuple[Tensor, Tensor]:
    """All 1797 pictures ``[n, 1, 8, 8]`` in [-1, 1] and their labels ``[n]``."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1  # [n, 1, 8, 8], from 0..16
    return images, torch.tensor(data.target)


def caption(labels: Tensor, generator: torch.Generator) -> Tensor:
    """A random caption for each label ``[n]``: its word, its parity or "any digit", as prompt numbers ``[n]``.

    Parity is drawn most often, since it is learned last.
    """
    u = torch.rand(len(labels), generator=generator)
    parity_or_any = torch.where(u < 0.8, 12 + labels % 2, 11)
    return torch.where(u < 0.3, 1 + labels, parity_or_any)


# ---------------------------------------------------------------------------------------------------- teacher


class Teacher(nn.Module):
    """The transformer and its conditioning table, which plays the text encoders' part."""

    def __init__(self):
        super().__init__()
        self.transformer = SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=1,
            out_channels=1,
            num_layers=3,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            caption_projection_dim=64,
            pos_embed_max_size=4,
        )
        self.table = nn.Parameter(torch.randn(len(PROMPTS), WIDTH))

    def forward(self, x: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
        """Velocity ``eps - x0`` at states x ``[B, 1, 8, 8]``, noise levels ``[B]`` and prompt numbers ``[B]``."""
        row = self.table[prompt]  # [B, 32]
        return self.transformer(
            hidden_states=x,
            timestep=sigma * 1000,
            encoder_hidden_states=row[:, None],  # [B, 1, 32]
            pooled_projections=row,
            return_dict=False,
        )[0]


def train_teacher(images: Tensor, labels: Tensor, steps: int, seed: int, batch: int = 128, lr: float = 2e-3) -> Teacher:
    """Flow matching with logit-normal noise levels; returns the moving average of the weights.

    Steps are few on purpose: more of them score better, but sharpen the velocity field around the training pictures
    and make it harder to distil.
    """
    with torch.random.fork_rng():  # modules draw their initial weights from the global generator
        torch.manual_seed(seed)
        teacher, average = Teacher(), Teacher()
    average.load_state_dict(teacher.state_dict())
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(teacher.parameters(), lr=lr)
    start = time.time()
    for step in range(steps):
        # warm-up over 100 steps, then a half cosine down to 0
        factor = min((step + 1) / 100, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = lr * factor

        pick = torch.randint(len(images), (batch,), generator=generator)
        # grey levels are 1/8 apart: noise between them keeps the velocity field from clinging to those values
        x0 = images[pick] + 0.07 * torch.randn(batch, 1, 8, 8, generator=generator)  # [B, 1, 8, 8]
        eps = torch.randn(x0.shape, generator=generator)
        sigma = (1.2 * torch.randn(batch, generator=generator)).sigmoid()  # [B], logit-normal
        prompt = caption(labels[pick], generator)  # [B]
        prompt[torch.rand(batch, generator=generator) < DROP] = 0

        s = sigma[:, None, None, None]
        loss = F.mse_loss(teacher((1 - s) * x0 + s * eps, sigma, prompt), eps - x0)
        loss.backward()
        nn.utils.clip_grad_norm_(teacher.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        decay = min(0.999, (step + 1) / (step + 10))  # an early average follows closely: the start is forgotten
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), teacher.parameters()):
                mean.lerp_(weight, 1 - decay)
        if step % 200 == 0 or step == steps - 1:
            print(f"teacher step {step:5d}  loss {loss.item():.4f}  {time.time() - start:.0f} s", flush=True)
    # what is shipped in half precision is what is evaluated: round now, once
    average.transformer.half().float()
    return average.eval().requires_grad_(False)


# ---------------------------------------------------------------------------------------------------- classifier


def train_classifier(images: Tensor, labels: Tensor, seed: int, steps: int = 1500) -> tuple[FeatureNet, float]:
    """The feature space: a classifier of four fifths of the digits, and its accuracy on the rest."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = FeatureNet()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    held_out, train = order[: len(order) // 5], order[len(order) // 5 :]
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for _ in range(steps):
        pick = train[torch.randint(len(train), (128,), generator=generator)]
        # noise keeps the features from hanging on single grey levels, which few-step samples get slightly wrong
        x = images[pick] + 0.1 * torch.randn(128, 1, 8, 8, generator=generator)
        F.cross_entropy(net(x), labels[pick], label_smoothing=0.1).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    net.eval().requires_grad_(False)
    return net, float((net(images[held_out]).argmax(1) == labels[held_out]).float().mean())


# ---------------------------------------------------------------------------------------------------- writing


def write(out: Path, teacher: Teacher, net: FeatureNet, images: Tensor, labels: Tensor, seed: int) -> None:
    """Everything but the model card, in the layouts that Diffusers, Datasets and :mod:`pdd.metrics` read."""
    pipeline = StableDiffusion3Pipeline(
        transformer=teacher.transformer.half(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=None,
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipeline.save_pretrained(out)
    teacher.transformer.float()

    vector = List(Value("float32"))
    columns = {"prompt": Value("string"), "prompt_embeds": List(vector), "pooled_prompt_embeds": vector}
    rows = [
        {"prompt": prompt, "prompt_embeds": [row], "pooled_prompt_embeds": row}
        for prompt, row in zip(PROMPTS, teacher.table.tolist())
    ]
    save_dataset(rows, columns, out / "conditioning")

    captions = caption(labels, torch.Generator().manual_seed(seed)).tolist()
    pairs = [{**rows[prompt], "latents": image} for prompt, image in zip(captions, images.tolist())]
    save_dataset(pairs, {**columns, "latents": List(List(vector))}, out / "latents")

    folder = out / "features"
    folder.mkdir(exist_ok=True)
    config = {"channels": net.conv1.out_channels, "width": net.project.out_features, "num_classes": len(DIGITS)}
    (folder / "config.json").write_text(json.dumps({**config, "prompts": CLASSES}, indent=1) + "\n")
    save_file(net.state_dict(), folder / "model.safetensors")
    reference = {"features": net.features(images), "labels": labels.to(torch.uint8)}
    save_file(reference, folder / "reference.safetensors")


def save_dataset(rows: list[dict], columns: dict, folder: Path) -> None:
    """Write rows as ``datasets.load_from_disk`` reads them; the fingerprint is fixed, or it would differ every time."""
    dataset = Dataset.from_list(rows, features=Features(columns))
    dataset._fingerprint = f"digits-{folder.name}"
    dataset.save_to_disk(folder)


# ---------------------------------------------------------------------------------------------------- judging


@torch.no_grad()
def evaluate(out: Path, images: Tensor, seed: int, count: int = 1000, steps: int = 32) -> tuple[list[dict], float]:
    """Figures of the teacher as written to ``out``.

    Returns:
        One dict a vague prompt (Frechet distance, diversity, ...), and the share of the word-prompted samples, a tenth
        as many a word, that the classifier takes for that digit.
    """
    net, reference = load_features(out)
    transformer = SD3Transformer2DModel.from_pretrained(out / "transformer").eval()
    rows = torch.tensor(Dataset.load_from_disk(out / "conditioning")["pooled_prompt_embeds"][:])  # [14, 32]
    generator = torch.Generator().manual_seed(seed)

    def sample(prompt: str, count: int) -> Tensor:
        """``[count, 1, 8, 8]`` by Euler, sigma from 1 to 0."""
        row = rows[PROMPTS.index(prompt)].expand(count, -1)  # [n, 32]
        x = torch.randn(count, 1, 8, 8, generator=generator)  # [n, 1, 8, 8]
        for i in range(steps, 0, -1):
            time = torch.full((count,), 1000 * i / steps)  # [n]
            x = x - transformer(x, row[:, None], row, time, return_dict=False)[0] / steps
        return x

    words = torch.cat([sample(word, count // 10) for word in DIGITS])  # [10 n / 10, 1, 8, 8]
    asked = torch.arange(10).repeat_interleave(count // 10)
    right = float((net(words).argmax(1) == asked).float().mean())

    figures = []
    for prompt in VAGUE:
        x, real = sample(prompt, count), reference[prompt]
        features = net.features(x)
        half = torch.randperm(len(real), generator=generator).chunk(2)
        # the nearest training picture, in pixels: a teacher that copied would come much closer than digits do
        copy = torch.cdist(x.flatten(1), images.flatten(1)).amin(1).median()
        figures.append({
            "prompt": prompt,
            "frechet": frechet_distance(features, real),
            "split": frechet_distance(real[half[0]], real[half[1]]),
            "diversity": diversity(features),
            "real": diversity(real),
            "right": float(torch.isin(net(x).argmax(1), torch.tensor(CLASSES[prompt])).float().mean()),
            "nearest": float(copy),
        })  # fmt: skip
        print({k: v if isinstance(v, str) else round(v, 3) for k, v in figures[-1].items()}, flush=True)
    return figures, right


def nearest_other(images: Tensor) -> float:
    """Median distance in pixels from a real digit to the nearest other one."""
    distance = torch.cdist(images.flatten(1), images.flatten(1))  # [n, n]
    return float(distance.fill_diagonal_(math.inf).amin(1).median())


CARD = """---
license: cc-by-4.0
library_name: diffusers
pipeline_tag: text-to-image
tags: [flow-matching, stable-diffusion-3, distillation, digits]
---
# A tiny digits teacher

A real Diffusers `StableDiffusion3Pipeline` that fits a test: an `SD3Transformer2DModel` of {parameters:,} parameters
(3 layers, 64 wide, patch 2) which draws 8x8 digits. It is the teacher that this repository distils by default.

| | |
|---|---|
| `transformer/`, `scheduler/`, `model_index.json` | the pipeline; half-precision weights, no VAE, no text encoder |
| `conditioning/` | dataset: `prompt`, `prompt_embeds` [1, 32], `pooled_prompt_embeds` [32]; one row a prompt |
| `latents/` | the same columns and `latents` [1, 8, 8]: the {images} training pictures, one caption each |
| `features/` | classifier of the digits and the real digits' features, for `pdd.metrics` |

Prompts: "zero" .. "nine", "any digit", "an even digit", "an odd digit", and the empty prompt (condition dropped).
The latents are the pictures themselves, scaled from 0..16 to [-1, 1].

```python
import torch
from datasets import load_from_disk
from diffusers import StableDiffusion3Pipeline

absent = ["vae", "text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3"]
pipeline = StableDiffusion3Pipeline.from_pretrained("assets/digits", **dict.fromkeys(absent))
row = load_from_disk("assets/digits/conditioning").with_format("torch")[11]  # "any digit"
images = pipeline(
    prompt_embeds=row["prompt_embeds"].expand(16, -1, -1),
    pooled_prompt_embeds=row["pooled_prompt_embeds"].expand(16, -1),
    latents=torch.randn(16, 1, 8, 8),
    guidance_scale=1,
    num_inference_steps=32,
    output_type="latent",
).images  # [16, 1, 8, 8] in about [-1, 1]
```

## How it was made
`python assets/make_digits.py --steps {steps} --seed {seed}` trains and writes everything here.
Flow matching, x = (1 - sigma) x0 + sigma eps, target eps - x0, timestep 1000 sigma; batch 128, Adam 2e-3 with warm-up
and cosine decay, logit-normal noise levels (scale 1.2), weight average 0.999, {drop:.0%} of the captions dropped.
A picture is captioned by its word (3 of 10), its parity (5 of 10) or "any digit"; the conditioning table is learned with it.
Noise of 0.07 is added to the pictures, whose grey levels are 0.125 apart.
It is deliberately not trained further: a longer-trained teacher scores better and is harder to distil.
The classifier saw four fifths of the digits and gets {accuracy:.1%} of the others right.

## Figures
1000 samples a prompt, {euler} Euler steps from sigma 1, no guidance. Frechet distance to the real digits of that prompt in
the classifier's standardised features, "split" the same between two random halves of those real digits (fewer
samples, so it is no lower bound); diversity is the mean distance of two samples of one prompt; "right" is the share that
the classifier finds to be what was asked for. Under the ten words {words:.1%} are what was asked for.

| prompt | Frechet | split | diversity | real digits' | right |
|---|---|---|---|---|---|
{table}

Median pixel distance to the nearest training picture: {nearest:.2f} for samples of "any digit", {other:.2f} from a real
digit to the nearest other one.

## Use and limits
For tests, demonstrations and experiments on distillation. It draws coarse digits and knows nothing else.

## Data
"Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak, UCI Machine Learning Repository (1998),
https://doi.org/10.24432/C50P49, CC BY 4.0, in the copy that scikit-learn distributes (`load_digits`, the 1797 pictures
of the original test set). Changes: scaled to [-1, 1], captions added. `latents/` holds the pictures.
"""


def model_card(figures: list[dict], **facts) -> str:
    """The card with the figures just measured."""
    row = "| {prompt} | {frechet:.2f} | {split:.2f} | {diversity:.2f} | {real:.2f} | {right:.1%} |"
    table = "\n".join(row.format(**f) for f in figures)
    return CARD.format(table=table, nearest=figures[0]["nearest"], **facts)  # the first is "any digit"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE / "digits", help="folder to write")
    parser.add_argument("--steps", type=int, default=1800, help="training steps of the teacher")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)  # small matrices gain nothing from more, and sums come out the same everywhere
    images, labels = digits()
    net, accuracy = train_classifier(images, labels, args.seed)
    print(f"classifier: {accuracy:.2%} of held-out digits right", flush=True)
    teacher = train_teacher(images, labels, args.steps, args.seed)
    write(args.out, teacher, net, images, labels, args.seed)
    figures, words = evaluate(args.out, images, args.seed)
    card = model_card(
        figures,
        parameters=sum(p.numel() for p in teacher.transformer.parameters()),
        images=len(images),
        steps=args.steps,
        seed=args.seed,
        drop=DROP,
        accuracy=accuracy,
        euler=32,
        words=words,
        other=nearest_other(images),
    )
    (args.out / "README.md").write_text(card)


if __name__ == "__main__":
    main()
