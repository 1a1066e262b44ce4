"""The DNA language model: causal, the same for any split, with memory that can be switched off."""

import numpy as np
import pytest
import torch

from titans_core.dna_model import ContextCounts, DnaModel, DnaModelConfig, Training, bits_per_base, embed, load, save, train, without_writes
from titans_core.tokenizers import complement

ORDERS = (1, 2, 3, 13)


def sequence(length, seed=0, unknown=0.02):
    choose = np.random.default_rng(seed)
    return choose.choice(5, length, p=[(1 - unknown) / 4] * 4 + [unknown]).astype(np.uint8)


@pytest.fixture(scope="module")
def parts():
    torch.manual_seed(0)
    genome = sequence(3000)
    counts = ContextCounts.of([genome], ORDERS)
    model = DnaModel(DnaModelConfig(orders=ORDERS, dim=8, heads=2)).eval()
    with torch.no_grad():
        for parameter in (model.weigh.weight, model.rest.weight):
            parameter.normal_(0, 0.2)
    return model, counts, genome


def test_counts_equal_counting_by_hand_on_both_strands():
    genome = sequence(300, seed=1)
    counts = ContextCounts.of([genome], (2, 13))
    for place, k in enumerate((2, 13)):
        table = {}
        for strand in (genome, complement(genome)):
            for i in range(k, len(strand)):
                if (strand[i - k : i + 1] < 4).all():
                    table.setdefault(tuple(strand[i - k : i]), np.zeros(4))[strand[i]] += 1
        found = counts.look_up(genome, 0, 300)[:, place]
        left = counts.look_up(genome, 0, 300, leave_out=True)[:, place]
        for i in range(300):
            clean = i >= k and (genome[i - k : i] < 4).all()
            expected = table.get(tuple(genome[i - k : i]), np.zeros(4)) if clean else np.zeros(4)
            assert found[i].tolist() == expected.tolist()
            own = np.eye(5)[genome[i]][:4] if clean else np.zeros(4)
            assert left[i].tolist() == (expected - own).tolist()
    assert np.array_equal(counts.look_up(genome, 120, 200), counts.look_up(genome, 0, 300)[120:200])


def test_any_split_equals_one_pass(parts):
    model, counts, _ = parts
    other = sequence(700, seed=2)
    whole, _ = bits_per_base(model, counts, other, piece=700)
    for piece in (1, 63, 64, 65, 256):
        if piece == 1:
            found, _ = bits_per_base(model, counts, other[:90], piece=1)
            assert found == pytest.approx(bits_per_base(model, counts, other[:90], piece=90)[0], abs=1e-5)
        else:
            assert bits_per_base(model, counts, other, piece=piece)[0] == pytest.approx(whole, abs=1e-5)


def test_a_changed_base_changes_no_earlier_answer(parts):
    model, counts, _ = parts
    codes = sequence(200, seed=3, unknown=0.0)
    changed = codes.copy()
    changed[120] = (codes[120] + 1) % 4

    def answers(bases):
        rows = torch.from_numpy(counts.look_up(bases, 0, 200))[None]
        return model(rows, torch.from_numpy(bases.astype(np.int64))[None], model.initial_state(1))[0]

    with torch.inference_mode():
        before, after = answers(codes), answers(changed)
    assert torch.equal(before[:, :121], after[:, :121])
    assert not torch.equal(before[:, 121:], after[:, 121:])
    torch.testing.assert_close(before.exp().sum(-1), torch.ones(1, 200))


def test_without_writes_the_memory_stays_empty_and_comes_back(parts):
    model, counts, _ = parts
    other = sequence(300, seed=4)
    carried, state = bits_per_base(model, counts, other)
    with without_writes(model):
        frozen, empty = bits_per_base(model, counts, other)
    assert bits_per_base(model, counts, other)[0] == carried
    assert frozen != carried
    assert float(empty.backbone[0].memory.W.abs().max()) < 1e-6 < float(state.backbone[0].memory.W.abs().max())


def test_saved_and_loaded_it_reads_the_same(parts, tmp_path):
    model, counts, _ = parts
    other = sequence(300, seed=6)
    save(model, counts, tmp_path / "m.safetensors")
    again, counts_again = load(tmp_path / "m.safetensors")
    assert bits_per_base(again, counts_again, other)[0] == bits_per_base(model, counts, other)[0]
    assert np.array_equal(embed(again, counts_again, other), embed(model, counts, other))
    assert np.allclose(embed(model, counts, other, piece=50), embed(model, counts, other), atol=1e-5)


def test_training_lowers_bits_on_a_genome_with_structure():
    choose = np.random.default_rng(5)
    step = choose.dirichlet([0.3] * 4, 16)
    genome = [0, 1]
    for _ in range(6000):
        genome.append(int(choose.choice(4, p=step[genome[-2] * 4 + genome[-1]])))
    codes = np.array(genome, np.uint8)
    counts = ContextCounts.of([codes[:5000]], ORDERS)
    torch.manual_seed(0)
    model = DnaModel(DnaModelConfig(orders=ORDERS, dim=8, heads=2))
    before, _ = bits_per_base(model, counts, codes, 5000)
    history = train(model, counts, [codes[:5000]], Training(steps=40, window=128, batch=8, rate=1e-2))
    after, _ = bits_per_base(model, counts, codes, 5000)
    assert len(history) == 40
    best = min(
        -np.log2(table[np.arange(len(codes) - 5000), codes[5000:]]).mean() for table in counts.back_off(codes, 5000, len(codes)).values()
    )
    assert after < before
    assert after < best + 0.02
