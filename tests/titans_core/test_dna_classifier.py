"""A language model fine-tuned to a classifier: rows apart, padding unseen, both strands one answer, saved whole, and it learns."""

import numpy as np
import pytest
import torch

from titans_core.classifier import ClassifierConfig, load, reverse_complement, save
from titans_core.config import ConfigError
from titans_core.dna_classifier import PretrainedClassifier, from_language_model
from titans_core.dna_model import ContextCounts, DnaModel, DnaModelConfig
from titans_core.dna_model import load as load_language_model

CONFIG = DnaModelConfig(orders=(1, 3, 14), dim=8)


@pytest.fixture(scope="module")
def language_model():
    genome = np.random.default_rng(0).choice(4, 3000, p=(0.4, 0.1, 0.1, 0.4)).astype(np.uint8)
    torch.manual_seed(0)
    return DnaModel(CONFIG).eval(), ContextCounts.of([genome], CONFIG.orders), genome


def made(language_model, **changes):
    torch.manual_seed(1)
    settings = {"classes": ("a", "b"), "length": 30, "kmer": 2, **changes}
    model = from_language_model(ClassifierConfig(**settings), *language_model[:2]).eval()
    model.composition_scale.fill_(0.5)
    return model


def rows_of(genome, count, length=30):
    return torch.from_numpy(np.stack([genome[i * 40 : i * 40 + length] for i in range(count)])).long()


def test_rows_do_not_see_each_other_and_padding_is_not_seen(language_model):
    model, x = made(language_model), rows_of(language_model[2], 6)
    x[2, 10:] = 4
    x[3] = 4
    with torch.inference_mode():
        whole = model(x)
        torch.testing.assert_close(whole, torch.cat([model(row[None]) for row in x]), atol=1e-5, rtol=1e-5)
        features = model._features(x)
        torch.testing.assert_close(model._features(x[2:3, :10]), features[2:3], atol=1e-5, rtol=1e-5)
    assert features.isfinite().all()
    torch.testing.assert_close(model.model.state_dict(), language_model[0].state_dict())


def test_both_strands_give_the_same_bits(language_model):
    model, x = made(language_model, strands="both"), rows_of(language_model[2], 6)
    with torch.inference_mode():
        assert torch.equal(model(x), model(reverse_complement(x)))


def test_saved_and_loaded_it_brings_its_counts(language_model, tmp_path):
    model, x = made(language_model), rows_of(language_model[2], 4)
    save(model, tmp_path / "m.safetensors")
    again, _ = load(tmp_path / "m.safetensors")
    assert isinstance(again, PretrainedClassifier) and again.config == model.config
    with torch.inference_mode():
        assert torch.equal(again(x), model(x))
    with pytest.raises(ConfigError, match="holds no DNA language model"):
        load_language_model(tmp_path / "m.safetensors")


def test_fine_tuning_moves_every_weight(language_model):
    model, x = made(language_model, kmer=0, dropout=0.0).train(), rows_of(language_model[2], 6)
    model(x).square().sum().backward()
    dead = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    # `rest` and `weigh` only make next-base probabilities; a fresh memory multiplies some gates and its first value by zero.
    assert all(any(word in name for word in ("init", "gates", "persistent", "rest", "weigh")) for name in dead), dead
