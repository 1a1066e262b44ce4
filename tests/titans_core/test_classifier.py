"""The classifier: strands, composition, calibration, files, and the same numbers with and without autograd."""

import numpy as np
import pytest
import torch

from titans_core.classifier import Card, ClassifierConfig, SequenceClassifier, load, reverse_complement, save, word_counts
from titans_core.config import ConfigError
from titans_core.tokenizers import encode_bases


def small(**changes):
    settings = {"classes": ("a", "b", "c"), "length": 37, "motifs": 8, "dim": 8, "heads": 2, "kmer": 2, "dropout": 0.0}
    torch.manual_seed(0)
    return SequenceClassifier(ClassifierConfig(**{**settings, **changes})).eval()


def codes(rows=5, length=37, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 5, (rows, length)))


@pytest.mark.parametrize("rule", ["exact", "stale", "deep"])
@pytest.mark.parametrize("layers", [("lmm",), ("mag",), ("lmm", "lmm")])
def test_rows_do_not_see_each_other_and_inference_mode_changes_nothing(rule, layers):
    model, x = small(rule=rule, layers=layers, window=2 if rule == "stale" else 1), codes()
    with torch.inference_mode():
        whole = model(x)
        alone = torch.cat([model(row[None]) for row in x])
    torch.testing.assert_close(whole, alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole, model(x), atol=1e-6, rtol=1e-6)
    assert whole.shape == (5, 3)
    torch.testing.assert_close(model.probabilities(x).sum(-1), torch.ones(5))


@pytest.mark.parametrize("strands", ["both", "equivariant"])
@pytest.mark.parametrize("length", [37, 36, 7])
def test_a_sequence_and_its_reverse_complement_get_the_same_bits(strands, length):
    model, x = small(strands=strands, length=length), codes(9, length)
    x[0, : length // 2] = 4  # mostly N, and a palindrome
    x[1] = torch.where(torch.arange(length) < length // 2, x[1] % 4, 3 - x[1].flip(0) % 4)
    model.composition_scale.fill_(0.7)
    with torch.inference_mode():
        assert torch.equal(model(x), model(reverse_complement(x)))
        assert torch.equal(model.probabilities(x), model.probabilities(reverse_complement(x)))
        forward = small(strands="forward", length=length)
        assert not torch.allclose(forward(x), forward(reverse_complement(x)))
        separate = small(strands=strands, length=length)  # the same without the choice of a first strand: equal up to rounding
        torch.testing.assert_close(separate.network(x), separate.network(reverse_complement(x)), atol=1e-5, rtol=1e-5)


def test_word_counts_equal_counting_by_hand():
    x = torch.from_numpy(encode_bases("ACGNACG")[None].astype(np.int64))
    counts = word_counts(x, 2, "forward")[0]
    expected = torch.zeros(16)
    expected[0 * 4 + 1], expected[1 * 4 + 2] = 2, 2  # AC twice, CG twice; the words with N are left out
    torch.testing.assert_close(counts, expected / expected.norm())
    both = word_counts(x, 2, "both")
    torch.testing.assert_close(both, word_counts(reverse_complement(x), 2, "both"))
    assert not word_counts(torch.full((1, 5), 4), 2, "forward").any()


def test_calibration_finds_the_branch_that_knows():
    model = small(classes=("a", "b"))
    choose = torch.Generator().manual_seed(1)
    target = torch.randint(0, 2, (400,), generator=choose)
    sign = (target * 2 - 1).float() * (torch.rand(400, generator=choose) < 0.9).float().mul(2).sub(1)
    knows = torch.stack((-sign, sign), 1)
    noise = torch.randn(400, 2, generator=choose)
    model.calibrate(noise, knows, target)
    assert model.composition_scale > 0.5
    assert abs(model.network_scale) < 0.2


@pytest.mark.parametrize("strands", ["forward", "equivariant"])
def test_every_parameter_learns(strands):
    model = small(kmer=0, strands=strands).train()
    model(codes()).square().sum().backward()
    dead = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # The model has no persistent tokens; a fresh memory multiplies some gates and its initial value by zero.
    assert all(any(word in name for word in ("init", "gates", "persistent")) for name in dead), dead


def test_saved_and_loaded_it_is_the_same_and_says_what_it_is(tmp_path):
    model, x = small(strands="both"), codes()
    model.composition_scale.fill_(0.3)
    save(model, tmp_path / "m.safetensors", Card(data={"train": "abc"}, scores={"mcc": 0.5}))
    again, card = load(tmp_path / "m.safetensors")
    assert torch.equal(model(x), again(x))
    assert again.config == model.config
    assert card == Card(data={"train": "abc"}, scores={"mcc": 0.5})


def test_wrong_shapes_and_settings_are_named():
    with pytest.raises(ConfigError, match="sorted and distinct"):
        small(classes=("b", "a"))
    with pytest.raises(ConfigError, match="at least two classes"):
        small(classes=("a",))
    with pytest.raises(ValueError, match="36 bases for a model of 37"):
        small()(codes(length=36))
