"""Training a language model: a loop that can stop anywhere and go on to the same bits, alone or on several workers.

A step's rows, its rate and its place in the data are functions of its number. A checkpoint holds everything else: weights, the optimiser's
moments, the memories carried between steps, and the losses so far. Workers take equal shares of the rows and add their gradients, so the
number of workers changes the result by rounding alone.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from connectors.errors import UserError
from pipelines.language.data import IGNORED, Corpus, Lanes, open_corpus
from titans_core import state as value
from titans_core.language_model import LanguageModel, LanguageModelConfig, decay_groups, load, save

KEPT = 2  # checkpoints
Progress = Callable[[int, float], None]


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained.

    rows, context: tokens of a step, over all workers and all parts. stretch: contexts that a memory is carried over (truncated
    back-propagation through time: gradients stay inside a context); 1 carries nothing. accumulate: parts that a step's rows are worked
    through in. schedule: `cosine` falls to a tenth of the rate, `wsd` (warm-up, stable, decay) holds it and falls to zero over the last
    `cooldown` share of the steps. precision: `bfloat16` runs under autocast with float32 weights.
    """

    steps: int
    rows: int = 16
    context: int = 512
    stretch: int = 1
    accumulate: int = 1
    rate: float = 3e-3
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup: float = 0.05
    cooldown: float = 0.2
    weight_decay: float = 0.1
    clip: float = 1.0
    precision: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    save_every: int = 100

    def __post_init__(self) -> None:
        for name in ("steps", "rows", "context", "stretch", "accumulate", "save_every"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} {getattr(self, name)} must be at least 1")
        if not (self.rate > 0 and math.isfinite(self.rate)):
            raise UserError(f"rate {self.rate} must be a number above 0, as 0.003")
        if self.schedule not in ("cosine", "wsd"):
            raise UserError(f"schedule '{self.schedule}' is none of cosine, wsd")
        if self.precision not in ("float32", "bfloat16"):
            raise UserError(f"precision '{self.precision}' is none of float32, bfloat16")

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, the first being 0."""
        warm = max(1, round(self.warmup * self.steps))
        if step < warm:
            return self.rate * (step + 1) / warm
        if self.schedule == "cosine":
            share = (step - warm) / max(1, self.steps - warm)
            return self.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))
        falling = max(1, round(self.cooldown * self.steps))
        return self.rate * min(1.0, (self.steps - step) / falling)


@dataclass(frozen=True)
class Worker:
    """One of `size` workers, each of which holds the whole model."""

    rank: int = 0
    size: int = 1

    def add(self, tensor: Tensor) -> None:
        """The sum over workers, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)

    def wait(self) -> None:
        if self.size > 1:
            torch.distributed.barrier()


def train(
    config: LanguageModelConfig, corpus: Corpus, settings: Training, folder: str | os.PathLike[str], *,
    worker: Worker | None = None, progress: Progress | None = None,
) -> list[float]:  # fmt: skip
    """Train, or go on from the newest checkpoint in `folder`, to the last step; returns the loss of every step, in nats a token.

    Leaves `model.safetensors` in the folder. Raises UserError where a checkpoint belongs to another model, corpus or other settings, and where
    the loss is no longer a number.
    """
    folder, worker = Path(folder), worker or Worker()
    parts = worker.size * settings.accumulate
    if settings.rows % parts:
        raise UserError(f"{settings.rows} rows do not divide into {worker.size} workers and {settings.accumulate} parts each")
    if settings.stretch > 1 and config.grows:
        raise UserError("a state that grows with the sequence cannot be carried from step to step: take --stretch 1")
    if config.vocabulary != corpus.tokenizer.size:
        raise UserError(f"the model knows {config.vocabulary} tokens, the corpus has {corpus.tokenizer.size}")
    lanes = Lanes(corpus, context=settings.context, rows=settings.rows, seed=settings.seed, stretch=settings.stretch)
    torch.manual_seed(settings.seed)
    model = LanguageModel(config)
    optimiser = torch.optim.AdamW(decay_groups(model, settings.weight_decay), lr=settings.rate, betas=(0.9, 0.95))
    size = settings.rows // parts
    mine = [range((worker.rank * settings.accumulate + part) * size, (worker.rank * settings.accumulate + part + 1) * size)
            for part in range(settings.accumulate)]  # fmt: skip
    facts = {"config": config.to_json(), "corpus": corpus.digest, "settings": dataclasses.asdict(settings)}
    losses: list[float] = []
    states: list[Any] = [None] * len(mine)
    found = newest(folder)
    if found is not None:
        losses, states = _restore(found, facts, model, optimiser, mine)
    autocast = torch.autocast("cpu", torch.bfloat16) if settings.precision == "bfloat16" else nullcontext()
    model.train()
    for step in range(len(losses), settings.steps):
        batch = lanes.batch(step)
        tokens, targets, starts = (torch.from_numpy(each) for each in batch)
        count = int((targets != IGNORED).sum())
        total = torch.zeros((), dtype=torch.float64)
        for part, rows in enumerate(mine):
            here = slice(rows.start, rows.stop)
            before = states[part]
            if before is None and settings.stretch > 1:
                before = model.initial_state(size)
            with autocast:
                logits, after = model.packed(tokens[here], starts[here], before)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets[here].flatten(), ignore_index=IGNORED, reduction="sum") / count
            loss.backward()
            total += loss.detach().double()
            states[part] = None if after is None else value.map_state(lambda leaf: leaf.detach(), after)
        _add_gradients(model, total, worker)
        losses.append(float(total))
        if not math.isfinite(losses[-1]):
            raise UserError(f"the loss is {losses[-1]} at step {step + 1}: lower the rate ({settings.rate})")
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        for group in optimiser.param_groups:
            group["lr"] = settings.rate_at(step)
        optimiser.step()
        optimiser.zero_grad()
        if progress is not None and worker.rank == 0:
            progress(step + 1, losses[-1])
        if (step + 1) % settings.save_every == 0 and step + 1 < settings.steps:
            _checkpoint(folder, facts, model, corpus, optimiser, losses, states, worker)
    model.eval()
    if worker.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save(model, corpus.tokenizer, folder / "model.safetensors")
    worker.wait()
    return losses


def newest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint of a folder."""
    found = sorted(Path(folder).glob("checkpoint-????????"))
    return found[-1] if found else None


def _add_gradients(model: LanguageModel, total: Tensor, worker: Worker) -> None:
    """Sum the gradients, and the loss, over the workers.

    A parameter that no row used (the persistent tokens, where every row goes on) gets a gradient of zero: the same on all workers and by any
    number of them.
    """
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if worker.size == 1:
        return
    grads = [cast(Tensor, parameter.grad) for parameter in model.parameters()]
    flat = torch.cat([grad.flatten() for grad in grads])
    worker.add(flat)
    worker.add(total)
    for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(summed.view_as(grad))


def _checkpoint(
    folder: Path, facts: dict[str, Any], model: LanguageModel, corpus: Corpus, optimiser: torch.optim.Optimizer,
    losses: list[float], states: list[Any], worker: Worker,
) -> None:  # fmt: skip
    """A folder that appears under its name when all of it is on disk; every worker writes the memories of its rows."""
    name = f"checkpoint-{len(losses):08d}"
    new = folder / f".{name}"
    if worker.rank == 0:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
    worker.wait()
    if states[0] is not None:
        write_whole(new / f"memories-{worker.rank:04d}", value.to_bytes(value.stack(states)))
    if worker.rank == 0:
        save(model, corpus.tokenizer, new / "model.safetensors")
        moments: dict[str, Tensor] = {}
        for key, parameter in model.named_parameters():
            held = optimiser.state.get(parameter, {})
            moments |= {f"{which}.{key}": held[which].contiguous() for which in ("exp_avg", "exp_avg_sq", "step") if which in held}
        save_file(moments, new / "moments.safetensors")
        write_whole(new / "progress.json", (json.dumps({**facts, "losses": losses, "workers": worker.size}) + "\n").encode())
    worker.wait()
    if worker.rank == 0:
        os.replace(new, folder / name)
        for old in sorted(folder.glob("checkpoint-????????"))[:-KEPT]:
            shutil.rmtree(old)
    worker.wait()


def write_whole(path: Path, data: bytes) -> None:
    """A file that is there with all its bytes, or as it was before."""
    new = path.with_name(f"{path.name}.new")
    with open(new, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def _restore(
    found: Path, facts: dict[str, Any], model: LanguageModel, optimiser: torch.optim.Optimizer, mine: list[range]
) -> tuple[list[float], list[Any]]:
    saved = json.loads((found / "progress.json").read_text())
    for name, what in (("config", "model"), ("corpus", "corpus")):
        if saved[name] != facts[name]:
            raise UserError(f"'{found}' was trained with another {what}: name another output folder, or remove this one")
    for name, now in facts["settings"].items():
        if saved["settings"].get(name) != now:
            before = saved["settings"].get(name)
            raise UserError(f"'{found}' was trained with {name} {before}, not {now}: say so again, or name another output folder")
    trained, _ = load(found / "model.safetensors")
    model.load_state_dict(trained.state_dict())
    moments = load_file(found / "moments.safetensors")
    for key, parameter in model.named_parameters():
        held = {which: moments[f"{which}.{key}"].clone() for which in ("exp_avg", "exp_avg_sq", "step") if f"{which}.{key}" in moments}
        if held:
            optimiser.state[parameter] = held
    files = sorted(found.glob("memories-????"))
    if not files:
        return saved["losses"], [None] * len(mine)
    like = model.initial_state(1)
    together = value.stack([value.from_bytes(file.read_bytes(), like) for file in files])
    together = value.map_state(lambda leaf: leaf.detach(), together)
    return saved["losses"], [value.select(together, list(rows)) for rows in mine]


def train_on_ray(
    config: LanguageModelConfig, corpus: str | os.PathLike[str], settings: Training, folder: str | os.PathLike[str], *,
    workers: int, progress: Progress | None = None,
) -> list[float]:  # fmt: skip
    """`train` on `workers` processes of Ray Train, joined by gloo. corpus and folder: paths that every worker sees."""
    from pipelines.windows import ray_cluster

    ray_cluster()
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    told = folder / "losses.jsonl"
    told.unlink(missing_ok=True)
    job = {
        "config": config.to_json(), "corpus": str(Path(corpus).resolve()), "settings": dataclasses.asdict(settings),
        "folder": str(folder), "threads": torch.get_num_threads(),
    }  # fmt: skip
    trainer = TorchTrainer(
        _ray_worker,
        train_loop_config=job,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=False),
        run_config=RunConfig(name="workers", storage_path=str(folder / "ray")),
    )
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(told, done, progress), daemon=True)
    watcher.start()
    try:
        trainer.fit()
    except Exception as error:
        cause = _mistake(error)
        raise cause if cause is not None else error from None
    finally:
        done.set()
        watcher.join()
        shutil.rmtree(folder / "ray", ignore_errors=True)
    return [json.loads(line)["loss"] for line in told.read_text().splitlines()]


def _mistake(error: BaseException | None) -> UserError | None:
    """The user's mistake inside what Ray raises, if that is what it is."""
    while error is not None:
        if isinstance(error, UserError):
            return error
        for each in getattr(error, "worker_failures", {}).values():
            found = _mistake(each)
            if found is not None:
                return found
        error = getattr(error, "cause", None) or error.__cause__
    return None


def _ray_worker(job: dict[str, Any]) -> None:
    import ray.train

    torch.set_num_threads(job["threads"])
    context = ray.train.get_context()
    worker = Worker(context.get_world_rank(), context.get_world_size())
    folder = Path(job["folder"])

    def tell(step: int, loss: float) -> None:
        with open(folder / "losses.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "loss": loss}) + "\n")

    found = newest(folder)
    if worker.rank == 0 and found is not None:
        for step, loss in enumerate(json.loads((found / "progress.json").read_text())["losses"], 1):
            tell(step, loss)
    config, settings = LanguageModelConfig.from_json(job["config"]), Training(**job["settings"])
    train(config, open_corpus(job["corpus"]), settings, folder, worker=worker, progress=tell)


def _watch(path: Path, done: threading.Event, progress: Progress | None) -> None:
    """Tell what the first worker wrote down, until the training is over."""
    at = 0
    while progress is not None:
        over = done.wait(0.5)
        if path.exists():
            with open(path) as file:
                file.seek(at)
                for line in file:
                    if line.endswith("\n"):
                        at += len(line)
                        seen = json.loads(line)
                        progress(seen["step"], seen["loss"])
        if over:
            return
