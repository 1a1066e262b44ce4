"""A Hugging Face distribution is named `kernels`, as our package is: with ours on the path `transformers` still works, and gets none of it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

SCRIPT = """
import sys
import kernels, titans_core.language_model
from transformers import LlamaConfig, LlamaForCausalLM
import torch
assert kernels.__file__ == sys.argv[1], kernels.__file__
config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
ids = LlamaForCausalLM(config).generate(torch.tensor([[1, 2]]), attention_mask=torch.ones(1, 2), max_new_tokens=3, min_new_tokens=3)
from kernels import dispatch, linear
q, k, v = (torch.randn(1, 1, 4, 8) for _ in range(3))
y, _ = dispatch.linear_exact(q, k, v, torch.full((1, 1, 4), 0.5), None, None, linear.matrix_state(torch.zeros(1, 8, 8), 1))
print(list(ids.shape), list(y.shape))
"""


def test_transformers_and_our_kernels_live_in_one_process():
    pytest.importorskip("transformers")
    words = [sys.executable, "-c", SCRIPT, str(ROOT / "kernels/__init__.py")]
    shown = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip() == "[1, 5] [1, 1, 4, 8]"
