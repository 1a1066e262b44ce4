"""A needle in a haystack (S-NIAH) at bytes: trained at 1,024 bytes, asked at up to 65,536, with the memory live, frozen and zeroed.

    python benchmarks/niah.py [--data FOLDER] [--models mac] [--tasks pk number word] [--lengths 1 2 4 8 16] [--samples 200]
        [--size small] [--steps 4000] [--runs FILE] [--seconds 400]

Tasks as in `pipelines/language/needles.py`: `pk` a word and seven digits in repeated noise, `number` the same in running text, `word` a word and
a UUID in running text. FOLDER holds kjv.txt.gz and jargon.txt.gz: rows for training take their filler from the first eight tenths of each,
tests from the last tenth; without --data both are text that this script makes, of disjoint words. Keys of training and tests are disjoint too.

Every model is trained once on all --tasks in turns; the loss is of the answers alone. A row for training holds as many needles and
questions as fit its half, one to eight; the first quarter of the steps has rows of 256 bytes and the second rows of 512, with the same bytes
a step. Forget gates begin at 6e-6, of which 2/3 is left after 64K bytes. A test row has one needle at a place drawn evenly, and one question at
its end. An answer counts when every byte of it is the most likely one given those before it, which is when greedy decoding writes it.

figures.TASK.MODEL.LENGTH: the share of --samples answers; LENGTH is 1K to 64K, and beside MODEL stand MODEL_frozen and MODEL_zeroed (`memory_mode`).
figures.bytes has the share of single bytes of answers at the same keys, figures.trained.MODEL the size, seconds of the processor and the
loss a byte of an answer over the last hundred steps. With --runs every finished test is a line of that file, the training's state lies
beside it, and a later call goes on from there.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import report  # noqa: E402

BOOKS = ("kjv.txt.gz", "jargon.txt.gz")
MODELS = ("mac", "mag", "lmm", "window")  # the last has no memory: what its window of 64 bytes cannot see it cannot know
MODES = ("on", "frozen", "zeroed")
TASKS = ("pk", "number", "word")
STEP, CONTEXT, RATE, FORGET, KEEP = 8192, 1024, 3e-3, -12.0, 100


def filler(folder: Path | None) -> dict[str, bytes]:
    """The text of training and that of tests."""
    if folder is not None:
        books = [gzip.open(folder / book, "rb").read() for book in BOOKS]
        return {
            "train": b"".join(book[: len(book) * 8 // 10] for book in books),
            "test": b"".join(book[len(book) * 9 // 10 :] for book in books),
        }
    rng = random.Random(0)
    words = sorted({"".join(rng.choice("bcdfghlmnrstw") + rng.choice("aeiou") for _ in range(rng.randint(1, 4))) for _ in range(4000)})
    rng.shuffle(words)
    halves = {"train": words[: len(words) // 2], "test": words[len(words) // 2 :]}
    return {part: " ".join(" ".join(rng.choices(known, k=8)).capitalize() + "." for _ in range(8000)).encode() for part, known in halves.items()}


def build(name: str, size: str) -> Any:
    import torch

    from titans_core.language_model import LanguageModel, configure
    from titans_core.memory import NeuralMemory

    model = LanguageModel(configure(size, 256, layers=name))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, NeuralMemory):
                module.gates.bias[: module.config.heads * module.forgets] = FORGET
    return model


def length_of(step: int, steps: int) -> int:
    """Bytes of the rows of a step of training."""
    return CONTEXT // 4 if step < steps // 4 else CONTEXT // 2 if step < steps // 2 else CONTEXT


def batch(tasks: list[str], length: int, text: bytes, rng: random.Random) -> tuple[Any, Any]:
    """Rows for one step of training: tokens (B, T) and where answers are (B, T)."""
    from pipelines.language import needles

    def row(task: Any) -> needles.Row:
        most = max(1, length // 2 // (2 * len(needles.told(needles.KEY, b"")) + 2 * needles.ANSWER[task]))
        return needles.draw(task, length, rng.randint(1, min(8, most)), text, "train", rng)

    return needles.stack([row(tasks[i % len(tasks)]) for i in range(STEP // length)])


def learn(name: str, options: Any, text: bytes, path: Path, end: float) -> Any:
    """The trained model and what its training took, or None where the time ended first; path: the training so far."""
    import torch
    import torch.nn.functional as F
    from safetensors import safe_open
    from safetensors.torch import save_file

    torch.manual_seed(options.seed)
    model = build(name, options.size)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    settings = {"size": options.size, "steps": options.steps, "tasks": options.tasks, "data": options.data is not None, "seed": options.seed}
    named, losses, seconds = dict(model.named_parameters()), [], 0.0
    if path.exists():
        with safe_open(str(path), "pt") as file:
            held = json.loads(file.metadata()["training"])
            if held["settings"] != settings:
                sys.exit(f"{path} is a training of other settings ({held['settings']}, asked for {settings}): name another file for --runs")
            losses, seconds = held["losses"], held["seconds"]
            with torch.no_grad():
                for key, parameter in named.items():
                    parameter.copy_(file.get_tensor(f"weight.{key}"))
                    optimiser.state[parameter] = {which: file.get_tensor(f"{which}.{key}") for which in ("exp_avg", "exp_avg_sq", "step")}

    def keep() -> None:
        tensors = {f"weight.{key}": parameter.detach() for key, parameter in named.items()}
        for key, parameter in named.items():
            tensors |= {f"{which}.{key}": tensor for which, tensor in optimiser.state[parameter].items()}
        new = path.with_name(f"{path.name}.new")
        save_file(tensors, new, {"training": json.dumps({"settings": settings, "losses": losses, "seconds": seconds})})
        os.replace(new, path)

    for step in range(len(losses), options.steps):
        if time.monotonic() > end:
            return None
        began = time.process_time()
        length = length_of(step, options.steps)
        tokens, answers = batch(options.tasks, length, text, random.Random(f"{options.seed} {step}"))
        hidden, _ = model.hidden(tokens[:, :-1], model.initial_state(len(tokens)))
        wanted = answers[:, 1:]
        logits = model.head(hidden[wanted])
        loss = F.cross_entropy(logits, tokens[:, 1:][wanted])
        loss.backward()
        for parameter in named.values():
            if parameter.grad is None:  # a memory's last write, which nothing reads
                parameter.grad = torch.zeros_like(parameter)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        if not math.isfinite(loss.item()) or not math.isfinite(norm):
            sys.exit(f"{name}: loss {loss.item()}, norm of the gradient {norm} at step {step + 1}: the training has failed")
        optimiser.param_groups[0]["lr"] = RATE * min((step + 1) / 50, 1.0, max(0.02, 5 * (1 - step / options.steps)))
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
        seconds += time.process_time() - began
        if (step + 1) % 50 == 0:
            report.progress(f"{name} step {step + 1}/{options.steps} of {length} bytes, loss {statistics.mean(losses[-50:]):.3f}, {seconds:.0f} s")
        if (step + 1) % KEEP == 0 or step + 1 == options.steps:
            keep()
    return model.eval(), {"params": model.parameters_count, "steps": len(losses), "train_cpu_s": seconds, "loss": statistics.mean(losses[-100:])}


def test(model: Any, task: Any, mode: Any, length: int, text: bytes, samples: int, seed: int) -> dict[str, Any]:
    """Samples are those of (task, length, seed), whatever the model and the mode."""
    import torch

    from pipelines.language import needles
    from titans_core.language_model import memory_mode

    rng, found = random.Random(f"test {task} {length} {seed}"), []
    began = time.process_time()
    with memory_mode(model, mode):
        for first in range(0, samples, 25):
            rows = [needles.draw(task, length, 1, text, "test", rng) for _ in range(min(25, samples - first))]
            found.append(needles.right(model, needles.stack(rows)[0], needles.ANSWER[task]))
    right = torch.cat(found)
    return {"exact": float(right.all(1).double().mean()), "bytes": float(right.double().mean()), "cpu_s": time.process_time() - began}


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0], data="folder with kjv.txt.gz and jargon.txt.gz")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["mac"], help="which models")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="what is trained and tested")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1, 2, 4, 8, 16], help="of test rows, in 1,024 bytes")
    parser.add_argument("--samples", type=int, default=200, help="test rows a task and length")
    parser.add_argument("--size", choices=("tiny", "small"), default="small", help="2 blocks of width 64, or 4 of 128")
    parser.add_argument("--steps", type=int, default=4000, help="steps of training, of 8,192 bytes each")
    parser.add_argument("--runs", type=Path, metavar="FILE", help="keeps trainings and finished tests, and takes those that it has")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop training, and begin no test, after so long")
    options = parser.parse_args()
    report.limit_threads(options.threads)
    text = filler(options.data)
    settings = {key: getattr(options, key) for key in ("tasks", "samples", "size", "steps", "seed")} | {"data": options.data is not None}
    runs = report.Runs(options.runs, settings, options.seconds)
    figures: dict[str, Any] = {"samples": options.samples, "filler": "books" if options.data else "made", "bytes": {}, "trained": {}}
    with tempfile.TemporaryDirectory() as place:
        beside = options.runs or Path(place) / "runs"
        for name in options.models:
            trained = learn(name, options, text["train"], beside.with_name(f"{beside.name}.{name}.safetensors"), runs.end)
            if trained is None:
                report.progress(f"{name}: the time is over before the training; call again with the same --runs to go on")
                continue
            model, figures["trained"][name] = trained
            for length in options.lengths:
                for task in options.tasks:
                    for mode in MODES if name != "window" else ("on",):
                        ask = (task, mode, 1024 * length, text["test"], options.samples, options.seed)
                        run = runs((name, task, mode, length), lambda ask=ask: test(model, *ask))  # noqa: B023
                        if run is None:
                            continue
                        shown = name if mode == "on" else f"{name}_{mode}"
                        report.progress(f"{task} {shown} {length}K: exact {run['exact']:.3f}, bytes {run['bytes']:.3f}, {run['cpu_s']:.0f} s")
                        figures.setdefault(task, {}).setdefault(shown, {})[f"{length}K"] = run["exact"]
                        figures["bytes"].setdefault(task, {}).setdefault(shown, {})[f"{length}K"] = run["bytes"]
    report.finish("niah", figures, libraries=("torch",))


if __name__ == "__main__":
    main()
