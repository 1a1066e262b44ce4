"""Two million tokens through a stack of memory blocks in inference: time per token flat, memory flat, every number finite.

The state is all that is carried from call to call, so the last token costs what the first did. Time is the median CPU time of
the calls of the first and of the last tenth (the machine is shared); resident memory is read after 1 % and at the end.
"""

from __future__ import annotations

import statistics
import time

from benchmarks import report


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=2_000_000, help="tokens in the stream")
    parser.add_argument("--call", type=int, default=2048, help="tokens a call")
    parser.add_argument("--dim", type=int, default=64, help="model width")
    parser.add_argument("--rule", default="exact", help="memory rule (see titans_core.config)")
    options = parser.parse_args()
    report.limit_threads(options.threads)

    import psutil
    import torch

    from titans_core import state as value
    from titans_core.blocks import Backbone
    from titans_core.config import BackboneConfig, MemoryConfig

    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(options.seed)
    memory = MemoryConfig(dim=options.dim, rule=options.rule)
    backbone = Backbone(BackboneConfig(memory=memory, layers=("lmm", "lmm"))).eval()
    process, calls = psutil.Process(), max(20, options.tokens // options.call)
    seconds, resident, finite = [], [], True
    generator = torch.Generator().manual_seed(options.seed)
    with torch.inference_mode():
        state = backbone.initial_state(1)
        for call in range(calls):
            x = torch.randn(1, options.call, options.dim, generator=generator)
            began = time.process_time()
            y, state = backbone(x, state)
            seconds.append(time.process_time() - began)
            finite = finite and bool(torch.isfinite(y).all())
            resident.append(process.memory_info().rss)
            if call % max(1, calls // 20) == 0:
                report.progress(f"{(call + 1) * options.call:>9,} tokens  {resident[-1] / 2**20:.0f} MiB")
        finite = finite and all(bool(torch.isfinite(leaf).all()) for _, leaf in value.leaves(state))
    tenth, first = calls // 10, max(1, calls // 100)
    early, late = statistics.median(seconds[:tenth]), statistics.median(seconds[-tenth:])
    figures = {
        "time_ratio": late / early,
        "rss_growth": resident[-1] / resident[first] - 1,
        "finite": finite,
        "tokens": calls * options.call,
        "tokens_per_s": options.call / late,
        "state_floats": sum(leaf.numel() for _, leaf in value.leaves(state)),
        "parameters": sum(p.numel() for p in backbone.parameters()),
    }
    report.finish("long_context", figures, libraries=("torch",))


if __name__ == "__main__":
    main()
