"""One memory layer: ours and the public ones, in one process, in turns, on one thread.

Every side is a whole layer of the same width with 4 heads: projections, gates, the memory and an output projection; ours
also has the paper's short convolution, a norm and an output gate, which no peer has. The memories hold the same number of
weights, 2 width^2 a stream (4 heads of d -> 4 d -> d), except the exact matrix memory (width^2 / 4) and attention (none).
What each side computes differs, and a ratio is only as comparable as that:

    ours, boundary           rule "deep", read "anchor": gradients re-taken at the start of every chunk, tokens read the
                             weights their chunk began with; gates for every token, head and memory layer
    ours, token              rule "deep", read "after": the papers' form, token t reads W_t, its own write included
    ours, matrix_exact       rule "exact": a matrix memory with the true per-token gradient, decaying to zero
    titans_pytorch           titans-pytorch's NeuralMemory with batch_size = chunk: gradients re-taken every chunk, tokens read
                             the chunk's start, one momentum and decay gate a chunk: the semantics of "boundary"
    titans_pytorch_default   the same without batch_size: every gradient at the weights the stream started with, a cheaper rule
    python_titans_miras      the same design by another author, in its own default (as titans_pytorch_default)
    titans_unofficial        a per-token memory of one head, D -> D -> D, read before its write; only in the streaming step
    sdpa                     norm, q/k/v projections, causal attention over the whole call, output projection

Forward runs without autograd (ours: one native call for the whole layer, from a fresh state); train is mean-square loss and
backward to every parameter, without an optimiser. Times are processor times of the one thread: a busy neighbour then costs
caches, not whole turns. Each round runs all sides; a figure is the median over rounds.

    figures.w128.{c16,c64}.{boundary,token,matrix_exact}.{forward,train}.vs_*
        our tokens a second over theirs, 1024 tokens, batch 1, everybody in float32; and figures.w128.{c16,c64}.bfloat16.* the same with
        the layer's option precision="bfloat16" (operands of products rounded, sums, states and gates in float32), the peers as before
    figures.bars.*
        the ratios that have a bar, in both precisions, and the first of the two that meets it ("neither" if none does)
    figures.step.*
        one token of one layer with carried state, width 128, chunk 64, token reads: turns of 500 steps after 50, medians of
        turn medians. batch64_over_bandwidth: a stream's step at batch 64, chunk ends staggered, over the time that reading and
        writing its state once takes at the bandwidth of a copy of the same size; batch64_p99_over_p50 of single steps
    figures.share.*
        the kernel alone (no projections), width 128, chunk 64, as a share of the fused-multiply-add peak measured in the run.
        Counted is the arithmetic the rule needs, triangles as halves. A token and head: matrix_exact 12 d^2 + 4 C d, deep with
        token reads 26 d h + 2 C (d + h), with boundary reads 18 d h; three times that in train (recomputation not counted)
    --grid adds width 256, 4096 tokens and batch 4 under figures.grid, cheapest first, in at most the minutes given (60) and 12 GiB:
    figures.grid.left_out names what time or memory left out (titans-pytorch keeps a copy of its weights for every chunk)
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import report

HEADS = 4
FORMS = ("boundary", "token", "matrix_exact")
PRECISIONS = ("float32", "bfloat16")
BARS = (  # chunk, form, direction, peer, times as many tokens a second
    ("c64", "boundary", "train", "titans_pytorch", 6.0),
    ("c16", "boundary", "train", "titans_pytorch", 14.0),
    ("c64", "boundary", "train", "titans_pytorch_default", 3.0),
    ("c64", "token", "train", "titans_pytorch", 3.0),
    ("c64", "matrix_exact", "forward", "titans_pytorch_default", 8.0),
    ("c64", "boundary", "forward", "titans_pytorch_default", 4.5),
)


def main() -> None:
    parser = report.arguments("One memory layer, ours and the public ones, in turns.")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each comparison; a figure is their median")
    parser.add_argument("--grid", type=float, nargs="?", const=60.0, metavar="MINUTES", help="also width 256, 4096 tokens and batch 4")
    parser.add_argument("--only", choices=["layers", "step", "share"], action="append", help="measure only this part")
    options = parser.parse_args()
    report.limit_threads(options.threads)
    import torch

    from kernels import native

    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(options.seed)
    warnings.filterwarnings("ignore")
    report.progress(f"{native.status().reason}; peak {native.fma_peak() / 1e9:.1f} GFLOP/s")
    parts = options.only or ["layers", "step", "share"]
    figures: dict[str, Any] = {"peak_gflops": native.fma_peak() / 1e9}
    if "share" in parts:
        figures |= shares(options.rounds)
    if "layers" in parts:
        figures["w128"] = {f"c{chunk}": compare(128, chunk, 1024, 1, options.rounds) for chunk in (16, 64)}
        figures["bars"] = bars(figures["w128"])
        if options.grid:
            figures["grid"] = grid(options.grid)
    if "step" in parts:
        figures["step"] = steps()
    report.finish("memory", figures, libraries=("torch", "titans-pytorch", "python-titans-miras", "titans-unofficial"))


# ------------------------------------------------------------------------------------------------------------------ the sides


def ours(width: int, chunk: int, form: str, precision: str = "float32") -> Any:
    """A NeuralMemory of the given form."""
    from titans_core.config import MemoryConfig
    from titans_core.memory import NeuralMemory

    own: dict[str, Any] = {"matrix_exact": {"rule": "exact", "decay_to_init": False}, "boundary": {"rule": "deep", "read": "anchor"}}
    settings = {"rule": "deep"} if form == "token" else own[form]
    return NeuralMemory(MemoryConfig(dim=width, heads=HEADS, chunk=chunk, precision=precision, **settings))  # type: ignore[arg-type]


class Serving:
    """`module` for B streams as a service runs it: without autograd, its state overwritten. x (B, T, D)."""

    def __init__(self, module: Any, batch: int) -> None:
        self.module, self.state = module, module.initial_state(batch)
        self.run = module.in_place()

    def __call__(self, x: Any) -> Any:
        return self.run(x, self.state)

    def forward(self, x: Any) -> Callable[[], None]:
        """A call over x from a fresh state."""
        import torch

        def run() -> None:
            with torch.inference_mode():
                self.run(x, self.module.initial_state(x.shape[0]))

        return run


def peer(name: str, width: int, chunk: int) -> Any:
    """A module whose call returns its output first."""
    import torch

    if name.startswith("titans_pytorch"):
        from titans_pytorch import NeuralMemory

        batch = None if name.endswith("default") else chunk
        return NeuralMemory(dim=width, heads=HEADS, dim_head=width // HEADS, chunk_size=chunk, batch_size=batch)
    if name == "python_titans_miras":
        from titans_miras.config import NeuralMemoryConfig
        from titans_miras.neural_memory import NeuralMemory as Miras

        return Miras(NeuralMemoryConfig(dim=width, heads=HEADS, dim_head=width // HEADS, chunk_size=chunk))
    if name == "titans_unofficial":
        from titans.utils.memory import NeuralMemoryModule

        return NeuralMemoryModule(d_model=width)

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.RMSNorm(width)
            self.qkv, self.out = torch.nn.Linear(width, 3 * width, bias=False), torch.nn.Linear(width, width, bias=False)

        def forward(self, x: Any) -> tuple[Any]:
            q, k, v = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in self.qkv(self.norm(x)).chunk(3, -1))
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return (self.out(y.transpose(1, 2).flatten(-2)),)

    return Attention()


# ------------------------------------------------------------------------------------------------------------------ whole layers

PEERS = ("titans_pytorch", "titans_pytorch_default", "python_titans_miras", "sdpa")


def compare(width: int, chunk: int, tokens: int, batch: int, rounds: int) -> dict[str, Any]:
    """Every form of ours over every peer, forward and train."""
    import torch

    x = torch.randn(batch, tokens, width)
    found: dict[str, Any] = {}
    forms = [(form, precision) for precision in PRECISIONS for form in FORMS]
    for direction in ("forward", "train"):
        sides: dict[str, Callable[[], None]] = {}
        for form, precision in forms:
            module = ours(width, chunk, form, precision)
            sides[f"{form} {precision}"] = (
                Serving(module, batch).forward(x)
                if direction == "forward"
                else train(module, lambda m=module: m(x, m.initial_state(batch))[0])
            )
        for name in PEERS:
            module = peer(name, width, chunk)
            sides[name] = forward(module, x) if direction == "forward" else train(module, lambda m=module: m(x)[0])
        seconds = in_turns(f"width {width} chunk {chunk} T {tokens} B {batch} {direction}", sides, rounds, tokens * batch)
        for form, precision in forms:
            mine = seconds[f"{form} {precision}"]
            of_precision = found if precision == "float32" else found.setdefault(precision, {})
            of_precision.setdefault(form, {})[direction] = {
                **{f"vs_{name}": over(seconds[name], mine) for name in PEERS},
                "tokens_per_s": tokens * batch / statistics.median(mine),
            }
        for name in PEERS:
            found.setdefault("tokens_per_s", {}).setdefault(name, {})[direction] = tokens * batch / statistics.median(seconds[name])
    return found


def bars(figures: dict[str, Any]) -> dict[str, Any]:
    """Each bar with our ratio in both precisions, and which of them meets it."""
    found = {}
    for chunk, form, direction, against, bar in BARS:
        ratios = {
            precision: (figures[chunk] if precision == "float32" else figures[chunk][precision])[form][direction][f"vs_{against}"]
            for precision in PRECISIONS
        }
        met = next((precision for precision in PRECISIONS if ratios[precision] >= bar), "neither")
        found[f"{chunk}.{form}.{direction}.vs_{against}"] = {"bar": bar, **ratios, "met_with": met}
        report.progress(f"{chunk} {form} {direction} over {against}: {ratios}, bar {bar}: {met}")
    return found


def forward(module: Any, x: Any) -> Callable[[], None]:
    import torch

    def run() -> None:
        with torch.no_grad():
            module(x)

    return run


def train(module: Any, output: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        module.zero_grad(set_to_none=True)
        output().square().mean().backward()

    return run


def over(theirs: list[float], mine: list[float]) -> float:
    """How many times faster: the median over rounds."""
    return round(statistics.median(a / b for a, b in zip(theirs, mine, strict=True)), 3)


def in_turns(title: str, sides: Mapping[str, Callable[[], None]], rounds: int, tokens: int) -> dict[str, list[float]]:
    """Processor seconds of one pass of each side in each round. A fast side repeats its pass until a tenth of a second is full."""
    repeats = {}
    for name, run in sides.items():
        run()
        began = time.thread_time()
        run()
        repeats[name] = max(1, round(0.1 / max(time.thread_time() - began, 1e-6)))
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in sides if turn % 2 == 0 else reversed(sides):
            began = time.thread_time()
            for _ in range(repeats[name]):
                sides[name]()
            seconds[name].append((time.thread_time() - began) / repeats[name])
    report.progress(title + ": " + ", ".join(f"{n} {tokens / statistics.median(s) / 1e3:.1f} k tokens/s" for n, s in seconds.items()))
    return seconds


def grid(minutes: float) -> dict[str, Any]:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (12 * 2**30, resource.RLIM_INFINITY))
    cells = itertools.product((128, 256), (16, 64), (1024, 4096), (1, 4))
    end, found, left_out = time.monotonic() + 60 * minutes, {}, []
    for width, chunk, tokens, batch in sorted(cells, key=lambda cell: cell[0] * cell[2] * cell[3] / cell[1]):
        name = f"w{width}_c{chunk}_t{tokens}_b{batch}"
        try:
            if time.monotonic() > end:
                raise TimeoutError("no time left")
            found[name] = compare(width, chunk, tokens, batch, 1)
        except (RuntimeError, MemoryError, TimeoutError) as error:
            left_out.append(f"{name}: {str(error).splitlines()[0]}")
            report.progress(left_out[-1])
    return found | {"left_out": left_out}


# ------------------------------------------------------------------------------------------------------------------ streaming


def steps(turns: int = 5, turn: int = 500, warm: int = 50) -> dict[str, float]:
    """One token of the deep layer, token reads, chunk 64, with carried state."""
    import torch

    width, chunk = 128, 64
    xs = torch.randn(turn, 1, 1, width)
    ours_step = Serving(ours(width, chunk, "token"), 1)
    matrix_step = Serving(ours(width, chunk, "matrix_exact"), 1)
    theirs, unofficial = peer("titans_pytorch", width, chunk), peer("titans_unofficial", width, chunk)
    carried: dict[str, Any] = {"titans_pytorch": None, "titans_unofficial": None}

    def step_titans_pytorch(x: Any) -> None:
        _, state = theirs(x, state=carried["titans_pytorch"])
        carried["titans_pytorch"] = state

    def step_unofficial(x: Any) -> None:
        _, carried["titans_unofficial"] = unofficial(x, carried["titans_unofficial"])

    sides: dict[str, Callable[[Any], Any]] = {
        "ours": ours_step, "ours_matrix": matrix_step, "titans_unofficial": step_unofficial, "titans_pytorch": step_titans_pytorch,
    }  # fmt: skip
    medians: dict[str, list[float]] = {name: [] for name in sides}
    with torch.inference_mode():
        for number in range(turns):
            for name, run in sides.items() if number % 2 == 0 else reversed(sides.items()):
                for t in range(warm):
                    run(xs[t])
                medians[name].append(statistics.median(_timed(run, xs, turn)))
        report.progress("step, batch 1: " + ", ".join(f"{n} {statistics.median(s) * 1e6:.1f} us" for n, s in medians.items()))
        batch = 64
        wide = Serving(ours(width, chunk, "token"), batch)
        wide.state.memory.phase.copy_(torch.arange(batch))  # no two streams end a chunk together
        state = [*wide.state.memory.W, *wide.state.memory.S, *wide.state.memory.anchor, wide.state.conv]
        size = sum(x.numel() * 4 for x in state)
        rows = torch.randn(64, batch, 1, width)
        times: list[float] = []
        copies: list[float] = []
        source, target = torch.zeros(size // 4), torch.zeros(size // 4)
        for _ in range(turns):
            began = time.thread_time()
            for _ in range(10):
                target.copy_(source)
            copies.append((time.thread_time() - began) / 10)
            for t in range(warm):
                wide(rows[t])
            times += _timed(wide, rows, turn)
        middle, copied = statistics.median(times), statistics.median(copies)
        p99 = sorted(times)[int(0.99 * len(times))]
        report.progress(
            f"step, batch {batch}: {middle / batch * 1e6:.1f} us a stream, p99 {p99 / batch * 1e6:.1f}; "
            f"state {size / batch / 1024:.0f} KiB a stream, "
            f"copied at {2 * size / copied / 1e9:.1f} GB/s in {copied / batch * 1e6:.1f} us"
        )
    return {
        "vs_titans_pytorch": over(medians["titans_pytorch"], medians["ours"]),
        "vs_titans_unofficial": over(medians["titans_unofficial"], medians["ours"]),
        "matrix_exact_vs_titans_pytorch": over(medians["titans_pytorch"], medians["ours_matrix"]),
        "batch64_over_bandwidth": round(middle / copied, 3),
        "batch64_p99_over_p50": round(p99 / middle, 3),
        **{f"{name}_us": round(statistics.median(s) * 1e6, 2) for name, s in medians.items()},
        "batch64_us_per_stream": round(middle / batch * 1e6, 2),
    }


def _timed(run: Callable[[Any], Any], xs: Any, count: int) -> list[float]:
    times = []
    for t in range(count):
        x = xs[t % len(xs)]
        began = time.thread_time()
        run(x)
        times.append(time.thread_time() - began)
    return times


# ------------------------------------------------------------------------------------------------------------------ share of the peak


def shares(rounds: int) -> dict[str, Any]:
    """The kernels alone at 1024 tokens, chunk 64, batch 1: width 128 under `share`, width 256 under `share_w256`."""
    forms = (("matrix_exact", "matrix_exact"), ("deep", "token"), ("deep_boundary", "boundary"))
    found: dict[str, Any] = {}
    for width in (128, 256):
        result = {name: share(width, 64, 1024, name, form, rounds) for name, form in forms}
        report.progress(f"share of the peak, width {width}: {result}")
        found["share" if width == 128 else f"share_w{width}"] = result
    return found


def share(width: int, chunk: int, tokens: int, name: str, form: str, rounds: int) -> dict[str, float]:
    import torch

    from kernels import native

    d = width // HEADS
    h = 4 * d
    flops = {"matrix_exact": 12 * d * d + 4 * chunk * d, "deep": 26 * d * h + 2 * chunk * (d + h), "deep_boundary": 18 * d * h}
    module = ours(width, chunk, form)
    scale = 1.0 if module.matrix else math.sqrt(d)
    init = None if module.matrix else tuple(module.init)
    x, seed = torch.randn(1, tokens, width), torch.randn(1, tokens, HEADS, d).transpose(1, 2)
    with torch.no_grad():
        state = module.initial_state(1)
        inputs = [*native.conv_heads(module.qkv(x), state.conv, module.conv.weight, HEADS, scale), *module._gates(x)]
        inputs = [z.contiguous() for z in inputs]
    leaves = [z.clone().requires_grad_() for z in inputs]

    def run(tensors: list[Any]) -> Any:
        if module.matrix:
            return native.linear_exact(*tensors, state.memory, chunk=chunk)[0]
        return native.deep(*tensors, state.memory, init=init, chunk=chunk, read=module.config.read)[0]

    def forward() -> None:
        with torch.no_grad():
            run(inputs)

    def train() -> None:
        torch.autograd.grad(run(leaves), [*leaves, *(init or ())], seed)

    ratios: dict[str, list[float]] = {"forward": [], "train": []}
    for _ in range(2 * rounds):  # the peak beside each, so that a clock that moves moves both
        peak = native.fma_peak(0.05)
        for direction, passes in (("forward", forward), ("train", train)):
            work = flops[name] * HEADS * tokens * (1 if direction == "forward" else 3)
            ratios[direction].append(work / in_turns_alone(passes) / peak)
    return {direction: round(statistics.median(r), 3) for direction, r in ratios.items()}


def in_turns_alone(run: Callable[[], None], passes: int = 5) -> float:
    """Median processor seconds of a few passes after one that does not count."""
    run()
    each = []
    for _ in range(passes):
        began = time.thread_time()
        run()
        each.append(time.thread_time() - began)
    return statistics.median(each)


if __name__ == "__main__":
    main()
