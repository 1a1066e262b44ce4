"""Multi-query associative recall (MQAR) at a size where linear attention fails: accuracy and training time against the floats of the state.

    python benchmarks/recall.py [--models titans_exact attention] [--pairs 16 32] [--seeds 3] [--limit 200] [--runs FILE] [--seconds 400]

A sequence is P pairs of a key and its value, then the P keys again in another order, each followed by its value: T = 4 P tokens without filler.
At each key asked again the model has to name the value; the loss is taken there alone. Keys are 2 P tokens, values 2 P others, so chance is
1 / (2 P): 0.031 at 16 pairs, 0.016 at 32. Every row is drawn anew.

Every model is two layers of a gated convolution over 3 tokens and a mixer, width 64, no feed-forward, one head. `attention`, `linear_attention`
(elu + 1, normalised), `titans_exact` and `delta_64` mix at width 64. `delta`, `omega` and `omega_poly` mix at widths that give
all three the same state, about 480 floats a layer. AdamW, 3e-3 for attentions and 6e-3 for
memories (the better of the two), one schedule for
all: the rate is held; from when 0.97 of a batch is answered
(mean of 20 steps) it falls to a tenth over 200 steps, or to zero over the last fifth of --limit processor-seconds. Training ends when
0.995 of 500 rows apart are answered (asked every 25 steps from 0.97 on), or at the limit.

figures.MODEL.P16|P32.{accuracy,sd,train_cpu_s,steps,state_floats}: mean and spread over seeds on 2,000 rows that neither trained nor ended
a training; seconds are of the processor, in training alone; reached: trainings that ended before the limit; state_floats of the mixer of
one layer (of attention: after T tokens). With --runs every finished training is a line of that file, and a later call makes those that lack.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import report  # noqa: E402

WIDTH, BATCH, FALL, SOLVED, ENOUGH = 64, 64, 200, 0.97, 0.995
RATES = {"attention": 3e-3, "linear_attention": 3e-3}  # memories: 6e-3, at which attention learns ten times slower
FORGET = -8.0  # of the sigmoid that forgets, at the start: the library's 0.02 keeps a twelfth over 128 tokens, and takes 1,000 steps to close
# name -> kind, width of the mixer, settings of its memory
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "attention": ("attention", 64, {}),
    "linear_attention": ("linear", 64, {}),
    "titans_exact": ("memory", 64, {}),
    "delta_64": ("memory", 64, {"momentum": False, "decay": False}),
    "delta": ("memory", 22, {"momentum": False, "decay": False}),
    "omega": ("memory", 20, {"momentum": False, "decay": False, "window": 2}),
    "omega_poly": ("memory", 8, {"momentum": False, "decay": False, "window": 2, "degree": 2}),
}


def build(name: str) -> Any:
    """A fresh model for P pairs is `build(name)(pairs)`."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    from titans_core.blocks import FullAttention
    from titans_core.config import BackboneConfig, MemoryConfig
    from titans_core.memory import CausalConv, NeuralMemory, RMSNorm

    kind, width, settings = MODELS[name]

    class GatedConv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.out = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
            self.conv = CausalConv(WIDTH, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            u, gate = self.enter(x).chunk(2, dim=-1)
            return self.out(self.conv(u, u.new_zeros(len(u), 2, WIDTH))[0] * F.silu(gate))

    class LinearAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

        def initial_state(self, batch: int) -> None:
            return None

        def forward(self, x: torch.Tensor, state: None) -> tuple[torch.Tensor, None]:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            scores = ((F.elu(q) + 1) @ (F.elu(k) + 1).mT).tril()
            return self.out(scores @ v / scores.sum(-1, keepdim=True)), None

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Linear(WIDTH, width, bias=False) if width != WIDTH else nn.Identity()
            self.up = nn.Linear(width, WIDTH, bias=False) if width != WIDTH else nn.Identity()
            memory = MemoryConfig(dim=width, heads=1, **settings)
            self.inner: nn.Module
            if kind == "memory":
                self.inner = NeuralMemory(memory)
                if memory.decay:
                    with torch.no_grad():
                        self.inner.gates.bias[: memory.heads] = FORGET
            elif kind == "attention":
                self.inner = FullAttention(BackboneConfig(memory=memory, layers=("attention",), persistent=0))
            else:
                self.inner = LinearAttention()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(self.inner(self.down(x), self.inner.initial_state(len(x)))[0])  # type: ignore[operator]

    class Model(nn.Module):
        def __init__(self, pairs: int) -> None:
            super().__init__()
            self.embedding = nn.Embedding(4 * pairs, WIDTH)  # of unit variance: a spread of 0.02 never leaves the plateau at this width
            self.layers = nn.ModuleList(nn.ModuleList([GatedConv(), Mixer()]) for _ in range(2))
            self.norms = nn.ModuleList(nn.ModuleList([RMSNorm(WIDTH), RMSNorm(WIDTH)]) for _ in range(2))
            self.norm, self.head = RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * pairs, bias=False)
            for part, module in self.named_modules():
                if isinstance(module, nn.Linear) and part.rpartition(".")[2] not in ("gates", "lags"):
                    nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for layer, norms in zip(self.layers, self.norms, strict=True):
                for part, norm in zip(layer, norms, strict=True):  # type: ignore[call-overload]
                    x = x + part(norm(x))
            return self.head(self.norm(x))

    return Model


def rows(pairs: int, count: int, generator: Any) -> tuple[Any, Any]:
    """tokens (count, 4 P); the places of the answers' keys are 2 P, 2 P + 2 ..., and what follows each is its answer."""
    import torch

    keys = torch.rand(count, 2 * pairs, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(2 * pairs, (count, pairs), generator=generator) + 2 * pairs
    order = torch.rand(count, pairs, generator=generator).argsort(1)
    shown = torch.stack((keys, values), 2).flatten(1)
    asked = torch.stack((keys.gather(1, order), values.gather(1, order)), 2).flatten(1)
    tokens = torch.cat((shown, asked), 1)
    return tokens, tokens[:, 2 * pairs + 1 :: 2]


def state_floats(name: str, pairs: int) -> int:
    """Numbers that the mixer of one layer holds at test time; a rule without momentum holds none for it."""
    kind, width, settings = MODELS[name]
    if kind == "attention":
        return 2 * width * 4 * pairs
    if kind == "linear":
        return width * width + width
    from titans_core.config import MemoryConfig

    memory = MemoryConfig(dim=width, heads=1, **settings)
    matrix = width * memory.features * (2 if memory.momentum else 1)
    return matrix + (memory.window * (width + memory.features) if memory.window > 1 else 0)


def answered(model: Any, pairs: int, count: int, generator: Any) -> float:
    """The share of answers that are right on `count` rows."""
    import torch

    with torch.inference_mode():
        right = []
        for _ in range(count // 250):
            tokens, answers = rows(pairs, 250, generator)
            right.append(float((model(tokens)[:, 2 * pairs :: 2].argmax(-1) == answers).float().mean()))
    return statistics.mean(right)


def learn(name: str, pairs: int, seed: int, limit: float) -> dict[str, Any]:
    """Train one model and test it."""
    import torch
    import torch.nn.functional as F

    torch.manual_seed(seed)
    model, rate = build(name)(pairs), RATES.get(name, 6e-3)
    generator = torch.Generator().manual_seed(1000 + seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    shares, step, solved_at, reached = [0.0] * 20, 0, None, False
    began, aside = time.process_time(), 0.0
    while not reached and (used := time.process_time() - began - aside) < limit:
        share = min(1.0, (limit - used) / (0.2 * limit))
        if solved_at is not None:
            share = min(share, max(0.1, 1 - (step - solved_at) / FALL))
        optimiser.param_groups[0]["lr"] = rate * min(share, (step + 1) / 20)
        tokens, answers = rows(pairs, BATCH, generator)
        logits = model(tokens)[:, 2 * pairs :: 2]
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        shares[step % 20] = float((logits.argmax(-1) == answers).float().mean())
        step += 1
        if solved_at is None and statistics.mean(shares) >= SOLVED:
            solved_at = step
        if solved_at is not None and (step - solved_at) % 25 == 0:
            asked = time.process_time()
            reached = answered(model, pairs, 500, torch.Generator().manual_seed(8)) >= ENOUGH
            aside += time.process_time() - asked
        if step % 100 == 0:
            report.progress(f"{name} P{pairs} seed {seed} step {step} loss {loss.item():.3f} answered {statistics.mean(shares):.3f} {used:.0f} s")
    seconds = time.process_time() - began - aside
    right = answered(model, pairs, 2000, torch.Generator().manual_seed(7))
    report.progress(f"{name} P{pairs} seed {seed}: accuracy {right:.4f} after {step} steps, {seconds:.0f} s")
    return {"accuracy": right, "train_cpu_s": seconds, "steps": step, "reached": reached}


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which models")
    parser.add_argument("--pairs", nargs="+", type=int, default=[16, 32], help="pairs of a sequence")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each, from --seed on")
    parser.add_argument("--limit", type=float, default=200.0, help="processor-seconds of one training")
    parser.add_argument("--runs", type=Path, metavar="FILE", help="keeps finished trainings, and takes those that it has")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no training after so long")
    options = parser.parse_args()
    report.limit_threads(options.threads)
    runs = report.Runs(options.runs, {"limit": options.limit}, options.seconds)
    figures: dict[str, Any] = {}
    for pairs in options.pairs:
        for name in options.models:
            seeds = range(options.seed, options.seed + options.seeds)
            asked = [runs((name, pairs, seed), lambda seed=seed: learn(name, pairs, seed, options.limit)) for seed in seeds]  # noqa: B023
            made = [run for run in asked if run is not None]
            if not made:
                continue
            mean = {key: statistics.mean(run[key] for run in made) for key in ("accuracy", "train_cpu_s", "steps")}
            spread = statistics.stdev(run["accuracy"] for run in made) if len(made) > 1 else 0.0
            here = mean | {"sd": spread, "reached": sum(run["reached"] for run in made), "state_floats": state_floats(name, pairs), "runs": made}
            figures.setdefault(name, {})[f"P{pairs}"] = here
    report.finish("recall", figures, libraries=("torch",))


if __name__ == "__main__":
    main()
