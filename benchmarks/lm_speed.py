"""Tokens a second of a small language model, training and generating, beside the Titans peers and a `transformers` Llama of the same size.

    python benchmarks/lm_speed.py [--rounds 5] [--batch 4] [--length 512] [--tokens 64]

All sides: bytes, two blocks of width 128 with 4 heads; MAC where the library has it, with segments and memory chunks of 64, 4 persistent tokens and
(the peers) 4 long-term tokens. The feed-forward of ours and of the Llama is widened until all have the parameters of titans-pytorch's
MAC within 3 %. Training is forward, loss and backward: with their default settings the peers' optimiser steps raise on a CPU
(parameters that share memory). Generating is `--tokens` tokens after a prompt of 16, one conversation, each library's own cache.
Sides run in turns; a ratio is the median over rounds of (peer's seconds / our seconds), ours being the MAC with the exact memory.

figures.train|generate.vs_titans_pytorch|vs_python_titans_miras|vs_llama are those medians; figures.tokens_per_second and figures.parameters have
every side, with our LMM and MAG for comparison.
"""

from __future__ import annotations

import logging
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import report  # noqa: E402

DIM, BLOCKS, HEADS, SEGMENT, PROMPT = 128, 2, 4, 64, 16
PEERS = {"titans_pytorch": "vs_titans_pytorch", "python_titans_miras": "vs_python_titans_miras", "llama": "vs_llama"}


class Side:
    """One model: a training pass over tokens (B, T + 1), and how many tokens it generated after a prompt (1, t)."""

    def __init__(self, model: Any, loss: Callable[[Any], Any], generate: Callable[[Any, int], int]) -> None:
        self.model, self.loss, self.generate = model, loss, generate

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)


def ours(layers: str, size: int) -> Side:
    """Our model with its feed-forward widened to `size` parameters."""
    import torch
    import torch.nn.functional as F

    from titans_core import generation
    from titans_core.config import BackboneConfig, MemoryConfig, Mixer
    from titans_core.language_model import LanguageModel, LanguageModelConfig
    from titans_core.tokenizers import ByteTokenizer

    def make(feed_forward: float) -> LanguageModel:
        mixer: Mixer = layers  # type: ignore[assignment]
        backbone = BackboneConfig(
            memory=MemoryConfig(dim=DIM, heads=HEADS, chunk=SEGMENT), layers=(mixer,) * BLOCKS, window=SEGMENT, segment=SEGMENT, persistent=4,
            feed_forward=feed_forward,
        )  # fmt: skip
        return LanguageModel(LanguageModelConfig(vocabulary=256, backbone=backbone))

    bare = make(8 / DIM).parameters_count
    model, tokenizer = make((size - bare) / (BLOCKS * 3 * DIM * DIM)), ByteTokenizer([])

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        logits, _ = model(tokens[:, :-1], model.initial_state(len(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def generate(prompt: torch.Tensor, count: int) -> int:
        [(_, talk)] = generation.read(model, prompt.tolist())
        writing = generation.Writing(model, tokenizer, talk, sampling=generation.Sampling(min_p=0.1), limit=count)
        assert len(list(writing)) > 0
        return int(writing.conversation().count) - prompt.shape[1]

    return Side(model, loss, generate)


def titans_pytorch() -> Side:
    from titans_pytorch import MemoryAsContextTransformer

    model = MemoryAsContextTransformer(
        num_tokens=256, dim=DIM, depth=BLOCKS, segment_len=SEGMENT, num_persist_mem_tokens=4, num_longterm_mem_tokens=4, heads=HEADS,
        dim_head=DIM // HEADS, neural_memory_kwargs={"dim_head": DIM // HEADS, "heads": HEADS},
    )  # fmt: skip
    return Side(model, lambda tokens: model(tokens, return_loss=True), _sample(model))


def python_titans_miras() -> Side:
    from titans_miras import MACTransformer, NeuralMemoryConfig, TransformerConfig

    memory = NeuralMemoryConfig(dim=DIM, chunk_size=SEGMENT, dim_head=DIM // HEADS, heads=HEADS)  # type: ignore[call-arg]
    config = TransformerConfig(
        num_tokens=256, dim=DIM, depth=BLOCKS, segment_len=SEGMENT, num_persist_mem_tokens=4, num_longterm_mem_tokens=4, heads=HEADS,
        dim_head=DIM // HEADS, neural_mem=memory,
    )  # fmt: skip
    model = MACTransformer(config=config)
    return Side(model, lambda tokens: model(tokens, return_loss=True), _sample(model))


def _sample(model: Any) -> Callable[[Any, int], int]:
    def generate(prompt: Any, count: int) -> int:
        return len(model.sample(prompt, PROMPT + count, use_cache=True, show_progress=False)[0].tolist())

    return generate


def llama(size: int) -> Side:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(width: int) -> Any:
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=256, hidden_size=DIM, intermediate_size=width, num_hidden_layers=BLOCKS, num_attention_heads=HEADS,
            max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        ))  # fmt: skip

    bare = sum(parameter.numel() for parameter in make(8).parameters())
    model = make(8 * round((size - bare) / (BLOCKS * 3 * DIM) / 8) + 8)

    def generate(prompt: torch.Tensor, count: int) -> int:
        mask = torch.ones_like(prompt)
        with torch.inference_mode():
            made = model.generate(prompt, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=True, min_p=0.1)
            return len(made[0, PROMPT:].tolist())

    return Side(model, lambda tokens: model(input_ids=tokens, labels=tokens).loss, generate)


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds in turns")
    parser.add_argument("--batch", type=int, default=4, help="rows of a training pass")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    options = parser.parse_args()
    report.limit_threads(options.threads)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import torch

    torch.manual_seed(options.seed)
    sides = {"titans_pytorch": titans_pytorch(), "python_titans_miras": python_titans_miras()}
    size = sides["titans_pytorch"].parameters
    sides |= {"llama": llama(size), "mac": ours("mac", size), "mag": ours("mag", size), "lmm": ours("lmm", size)}
    parameters = {name: side.parameters for name, side in sides.items()}
    assert all(abs(count / size - 1) < 0.03 for count in parameters.values()), parameters
    tokens = torch.randint(256, (options.batch, options.length + 1))
    prompt = torch.randint(256, (1, PROMPT))

    def train(side: Side) -> Callable[[], None]:
        def run() -> None:
            side.model.train()
            side.model.zero_grad()
            side.loss(tokens).backward()

        return run

    def generate(side: Side) -> Callable[[], None]:
        def run() -> None:
            side.model.eval()
            assert side.generate(prompt, options.tokens) == options.tokens

        return run

    figures: dict[str, Any] = {"parameters": parameters, "tokens_per_second": {}}
    for task, make, count in (("train", train, options.batch * options.length), ("generate", generate, options.tokens)):
        seconds = report.in_turns({name: make(side) for name, side in sides.items()}, options.rounds)
        figures["tokens_per_second"][task] = {name: count / statistics.median(each) for name, each in seconds.items()}
        each = {key: report.ratio(seconds[name], seconds["mac"]) for name, key in PEERS.items()}
        figures[task] = {key: found["median"] for key, found in each.items()}
        figures.setdefault("spread", {})[task] = {key: [found["low"], found["high"]] for key, found in each.items()}
    report.finish("lm_speed", figures, libraries=("torch", "titans-pytorch", "python-titans-miras", "transformers"))


if __name__ == "__main__":
    main()
