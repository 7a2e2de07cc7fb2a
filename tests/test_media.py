"""Videos and sounds read back, and what sample_pdd.py writes for a family that decodes."""

import importlib
import wave

import av
import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image

from pdd.backbones import read_backbone
from pdd.media import write_sound, write_video


def test_a_video_with_sound_reads_back(tmp_path):
    ramp = torch.linspace(0, 1, 6)[:, None, None, None].expand(6, 3, 32, 48)
    time = torch.arange(12000) / 24000
    sound = torch.stack([0.5 * torch.sin(2 * torch.pi * 440 * time), torch.zeros(12000)])
    write_video(tmp_path / "a.mp4", ramp, 12.0, sound, 24000)
    with av.open(str(tmp_path / "a.mp4")) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert container.streams.video[0].average_rate == 12
    assert len(frames) == 6 and frames[0].shape == (32, 48, 3)
    assert [frame.mean() / 255 for frame in frames] == pytest.approx(ramp[:, 0, 0, 0].tolist(), abs=0.02)
    with av.open(str(tmp_path / "a.mp4")) as container:
        heard = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], 1)
    assert heard.shape[0] == 2 and abs(heard[0]).max() == pytest.approx(0.5, abs=0.1) and abs(heard[1]).max() < 0.05
    spectrum = np.abs(np.fft.rfft(heard[0][2000:10000]))
    assert spectrum.argmax() * 24000 / 8000 == pytest.approx(440, abs=4)


def test_a_sound_reads_back(tmp_path):
    sound = torch.tensor([[0.0, 0.5, -1.0, 2.0], [0.25, 0.0, 0.0, 0.0]])
    write_sound(tmp_path / "a.wav", sound, 16000)
    with wave.open(str(tmp_path / "a.wav")) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 16000, 4)
        samples = np.frombuffer(file.readframes(4), np.int16).reshape(4, 2)
    assert samples[:, 0].tolist() == [0, 16384, -32767, 32767] and samples[0, 1] == 8192


@pytest.mark.parametrize("name", ["sd3", "wan", "ltx2", "minimax_h3"])
def test_sampling_decodes_to_files(name, warm, tmp_path):
    """A tiny checkpoint, trained for a few updates and sampled, both by the real scripts."""
    module = importlib.import_module(f"family_{name}")
    teacher, size = tmp_path / "teacher", getattr(module, "SIZE", None)
    module.build(teacher)
    backbone = read_backbone(teacher, size)
    rows = {c: v.tolist() for c, v in module.conditioning(2, 1).items()}
    Dataset.from_dict({"prompt": ["a red ball", "rain"], **rows}).save_to_disk(str(teacher / "conditioning"))
    sizes = [word for k, v in vars(size).items() if v for word in (f"--{k}", v)] if size else []
    batch = getattr(module, "BATCH", 1)
    run = warm.train(tmp_path / "run", "--teacher", teacher, *sizes, "--train_micro_batch_size_per_gpu", batch)
    code, output = warm("sample", "--run", run, "--steps", "2", "--num", "2", "--batch", "2")
    assert code == 0, output
    picture = Image.open(run / "sample-nfe2-seed0.png")
    assert picture.size[0] > picture.size[1] * 0.5 and np.asarray(picture).std() > 1

    # tolerance 0 stops at every node that training started from, which are those of four blocks
    for flag in (("--steps", "4"), ("--tol", "0")):
        code, output = warm("sample", "--run", run, *flag, "--num", "2", "--batch", "2")
        assert code == 0 and (flag[0] == "--steps" or "4.00 forwards a sample" in output), output
    four, chosen = (np.asarray(Image.open(run / f"sample-{kind}-seed0.png")).astype(int) for kind in ("nfe4", "tol0"))
    assert four.shape == chosen.shape and abs(four - chosen).max() <= 2

    videos = sorted((run / "sample-nfe2-seed0").glob("*.mp4"))
    if backbone.frame_rate == 0:
        assert not videos
        return
    assert [v.name for v in videos] == ["a-red-ball-0.mp4", "a-red-ball-1.mp4", "rain-0.mp4", "rain-1.mp4"]
    with av.open(str(videos[0])) as container:
        frames = sum(1 for _ in container.decode(video=0))
        assert frames == size.num_frames
        assert bool(container.streams.audio) == ("audio" in backbone.modalities)
    assert len(list((run / "sample-nfe2-seed0").glob("*.wav"))) == (4 if "audio" in backbone.modalities else 0)

    code, output = warm("eval", "--run", run, "--steps", "2", "--num", "2", "--trajectories", "2", "--tol")
    assert code == 0, output
    page = (run / "report.html").read_text()
    assert page.count("<img") == page.count("<video") == 6  # teacher, student, Euler of two prompts
    assert page.count("<video controls") == 6 * ("audio" in backbone.modalities), "with sound, nothing plays by itself"
