"""Byte-level language models of equal size on real text: bits a byte of attention, windows, memories and both together, and ablations.

    python benchmarks/lm_small.py --data FOLDER [--models attention window lmm mag mac atlas_mag] [--tokens 5000000] [--seeds 3] [--work FOLDER]

FOLDER holds kjv.txt.gz (King James Bible) and jargon.txt.gz (Jargon File). The first eight tenths of each are trained on, the ninth is for
choices while developing, and the last is tested on once, at the end. Context 1024, attention window 64, four blocks of width 128; the
feed-forward of every model is widened or narrowed to the parameters of the MAG within 3 %. All models see the same rows in the same
order under one schedule (cosine, 3e-3, AdamW).

    attention  Transformer++ with full attention      lmm, mag, mac   the exact matrix memory alone, beside and before a window
    window     sliding-window attention alone         atlas_mag       MAG with the Omega rule and Muon on a matrix (one Muon write a chunk)
    mag_deep   MAG with the papers' MLP memory        ablations of mag: mag_no_decay, mag_no_momentum, mag_no_conv, mag_no_persistent

figures.MODEL.{bits_per_byte,sd,params}: mean and spread over seeds on the test tenths, each context read afresh as in training;
carried_bits_per_byte reads each tenth with the memory carried from its first byte; frozen_bits_per_byte has the memory's writes switched off.
train_cpu_s is of the processor, where a training was broken off that of the steps since, scaled to all of them; first_loss and last_loss are
means over a twentieth of the steps, in nats. With --work every training leaves its checkpoints there and every finished run is a line of its
runs.ndjson: a later call goes on where the earlier one ended, and with --seconds ends in time.
"""

from __future__ import annotations

import gzip
import math
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import report  # noqa: E402

BOOKS = ("kjv.txt.gz", "jargon.txt.gz")
# name -> mixer, settings of the memory and the blocks
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("attention", {}),
    "window": ("window", {}),
    "lmm": ("lmm", {}),
    "mag": ("mag", {}),
    "mac": ("mac", {}),
    "atlas_mag": ("mag", {"rule": "atlas", "depth": 1, "window": 8, "degree": 2, "heads": 8, "muon_every": 64}),
    "mag_deep": ("mag", {"rule": "deep"}),
    "mag_no_decay": ("mag", {"decay": False}),
    "mag_no_momentum": ("mag", {"momentum": False}),
    "mag_no_conv": ("mag", {"conv": 1}),
    "mag_no_persistent": ("mag", {"persistent": 0}),
}
MAIN = ("attention", "window", "lmm", "mag", "mac", "atlas_mag")
CONTEXT, ROWS = 1024, 8


def tenths(folder: Path, work: Path, last: str) -> dict[str, Any]:
    """Corpora of the training tenths and of the tenths that are scored."""
    from pipelines.language.data import pack
    from titans_core.generation import END, START
    from titans_core.tokenizers import ByteTokenizer

    parts: dict[str, list[Path]] = {"train": [], last: []}
    for book in BOOKS:
        text = gzip.open(folder / book, "rb").read().decode()
        cuts = [len(text) * n // 10 for n in (0, 8, 9, 10)]
        span = {"train": (cuts[0], cuts[1]), "valid": (cuts[1], cuts[2]), "test": (cuts[2], cuts[3])}
        for name in parts:
            path = work / f"{name}-{book.removesuffix('.gz')}"
            path.write_text(text[slice(*span[name])])
            parts[name].append(path)
    return {name: pack(paths, work / name, ByteTokenizer([START, END])) for name, paths in parts.items()}


def configure(name: str, vocabulary: int) -> Any:
    """The model of that name at the size of `mag`."""
    from dataclasses import replace

    import torch

    from titans_core.language_model import LanguageModel, LanguageModelConfig
    from titans_core.language_model import configure as make

    def count(config: LanguageModelConfig) -> int:
        with torch.device("meta"):
            return LanguageModel(config).parameters_count

    target = count(make("small", vocabulary, layers="mag"))
    layers, settings = MODELS[name]
    config = make("small", vocabulary, layers=layers, **settings)
    width, blocks = config.backbone.dim, len(config.backbone.layers)
    ratio = config.backbone.feed_forward + (target - count(config)) / (3 * width * width * blocks)
    config = replace(config, backbone=replace(config.backbone, feed_forward=ratio))
    assert abs(count(config) / target - 1) < 0.03, (name, count(config), target)
    return config


def learn(name: str, corpora: dict[str, Any], scored: str, tokens: int, seed: int, folder: Path) -> dict[str, float]:
    from pipelines.language.evaluation import score
    from pipelines.language.training import Training, train
    from titans_core.language_model import load, memory_mode

    steps = max(1, tokens // (ROWS * CONTEXT))
    # Row by row where the rule is Omega with Muon, which holds gigabytes for the gradients of a batch of eight.
    parts = ROWS if name == "atlas_mag" else 1
    settings = Training(steps=steps, rows=ROWS, context=CONTEXT, accumulate=parts, rate=3e-3, seed=seed, save_every=min(50, max(1, steps // 8)))
    made, part = 0, max(1, steps // 20)

    def progress(step: int, loss: float) -> None:
        nonlocal made
        made += 1
        if step % part == 0:
            speed = made * ROWS * CONTEXT / (time.process_time() - began)
            report.progress(f"{name} seed {seed} step {step}/{steps} loss {loss:.3f}, {speed:,.0f} bytes a processor-second")

    began = time.process_time()
    losses = train(configure(name, corpora["train"].tokenizer.size), corpora["train"], settings, folder, progress=progress)
    seconds = (time.process_time() - began) * steps / max(1, made)
    model, _ = load(folder / "model.safetensors")
    found = {"bits_per_byte": score(model, corpora[scored], context=CONTEXT, carried=False).bits_per_byte, "train_cpu_s": seconds}
    if name not in ("attention", "window"):
        with memory_mode(model, "frozen"):
            found["frozen_bits_per_byte"] = score(model, corpora[scored], context=CONTEXT, carried=False).bits_per_byte
        found["carried_bits_per_byte"] = score(model, corpora[scored], context=CONTEXT, carried=True).bits_per_byte
    found |= {"first_loss": statistics.mean(losses[:part]), "last_loss": statistics.mean(losses[-part:])}
    report.progress(f"{name} seed {seed}: " + ", ".join(f"{key} {number:.4f}" for key, number in found.items()))
    return found | {"params": model.parameters_count}


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0], data="folder with kjv.txt.gz and jargon.txt.gz")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MAIN), help="which models")
    parser.add_argument("--tokens", type=int, default=5_000_000, help="bytes that each model is trained on")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each, from --seed on")
    parser.add_argument("--scored", choices=("valid", "test"), default="test", help="the tenth that is scored; valid while developing")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="keeps checkpoints and finished runs, and goes on from those that it has")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no training after so long")
    options = parser.parse_args()
    report.limit_threads(options.threads)
    if options.data is None:
        parser.error("--data is needed")
    figures: dict[str, Any] = {"tokens": options.tokens, "scored": options.scored}
    with tempfile.TemporaryDirectory() as place:
        corpora = tenths(options.data, Path(place), options.scored)
        work = options.work or Path(place)
        work.mkdir(parents=True, exist_ok=True)
        runs = report.Runs(work / "runs.ndjson", {"tokens": options.tokens, "scored": options.scored}, options.seconds)
        for name in options.models:
            seeds = range(options.seed, options.seed + options.seeds)
            train = partial(learn, name, corpora, options.scored, options.tokens)
            asked = [runs((name, seed), partial(train, seed, work / f"{name}-{seed}")) for seed in seeds]
            if made := [run for run in asked if run is not None]:
                mean = {key: statistics.mean(run[key] for run in made) for key in made[0]}
                spread = statistics.stdev(run["bits_per_byte"] for run in made) if len(made) > 1 else 0.0
                figures[name] = mean | {"sd": spread, "runs": made}
    report.finish("lm_small", figures, libraries=("torch",))


if __name__ == "__main__":
    main()
