"""Pretraining in parts equals pretraining whole, and a pretrained model can be fine-tuned from the command line."""

import json
import random

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from connectors.errors import UserError
from pipelines.genomics.commands import app
from pipelines.genomics.pretraining import pretrain, read_contigs
from titans_core.dna_classifier import PretrainedClassifier
from titans_core.dna_model import ContextCounts, DnaModel, DnaModelConfig, Training, load, window_gradients

CONFIG = DnaModelConfig(orders=(1, 2, 12), dim=8)
TRAINING = Training(steps=4, window=64, batch=6, rate=1e-2, seed=3)


def contigs():
    choose = np.random.default_rng(2)
    return [choose.choice(5, size, p=(0.4, 0.1, 0.1, 0.38, 0.02)).astype(np.uint8) for size in (900, 400)]


def test_parts_of_a_step_add_up():
    torch.manual_seed(0)
    model, genome = DnaModel(CONFIG), contigs()
    counts = ContextCounts.of(genome, CONFIG.orders)
    places = [(0, 5), (1, 100), (0, 700), (1, 3)]
    whole = window_gradients(model, counts, genome, places, 64)
    parts = [window_gradients(model, counts, genome, share, 64) for share in (places[:1], places[1:])]
    assert whole[0] == pytest.approx(sum(part[0] for part in parts), rel=1e-5) and whole[1] == sum(part[1] for part in parts)
    for together, *apart in zip(whole[2], *(part[2] for part in parts), strict=True):
        torch.testing.assert_close(together, sum(apart), atol=1e-4, rtol=1e-4)


@pytest.mark.ray
def test_on_ray_the_model_is_the_same():
    genome = contigs()
    local, counts, history = pretrain(genome, CONFIG, TRAINING)
    shared, held, again = pretrain(genome, CONFIG, TRAINING, executor="ray", workers=2)
    assert history == pytest.approx(again, rel=1e-4)
    # Sums in another order: Adam divides by the size of a gradient, so where that is next to nothing its rounding shows.
    torch.testing.assert_close(shared.state_dict(), local.state_dict(), atol=2e-3, rtol=1e-2)
    for name, table in counts.tensors().items():
        assert np.array_equal(table, held.tensors()[name])


def test_genomes_without_a_base_or_too_short_are_named(tmp_path):
    (tmp_path / "e.fa").write_text(">a\n")
    with pytest.raises(UserError, match="no base to learn from"):
        read_contigs([str(tmp_path / "e.fa")])
    with pytest.raises(UserError, match="no contig is longer than the window of 64"):
        pretrain([np.zeros(10, np.uint8)], CONFIG, TRAINING)


def test_a_pretrained_model_is_fine_tuned_registered_and_used(tmp_path):
    """Windows of a genome against shuffled ones: only the language model knows the genome."""
    choose = random.Random(1)
    genome = "".join(choose.choices("ACGT", k=12_000))
    (tmp_path / "g.fa").write_text(f">g\n{genome}\n")
    for name, count, start in (("train", 120, 0), ("dev", 40, 5000), ("test", 40, 8000)):
        lines = ["sequence\tlabel"]
        for i in range(count):
            window = genome[start + 30 * i : start + 30 * i + 30]
            lines += [f"{window}\tgenome", "".join(choose.sample(window, 30)) + "\tshuffled"]
        (tmp_path / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    model, runner = str(tmp_path / "lm.safetensors"), CliRunner()
    made = runner.invoke(app, ["pretrain", str(tmp_path / "g.fa"), "--output", model, "--steps", "2"])
    assert made.exit_code == 0, made.output
    assert len(load(model)[1].orders) == 12
    output = tmp_path / "m.safetensors"
    arguments = ["train", *(str(tmp_path / "train.tsv"), "--dev", str(tmp_path / "dev.tsv"), "--test", str(tmp_path / "test.tsv"))]
    arguments += ["--pretrained", model, "--row-passes", "1500", "--tracking-uri", f"sqlite:///{tmp_path}/t.db", "--output", str(output)]
    done = runner.invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    scores = {name: each["all"]["mcc"]["value"] for name, each in json.loads(done.stdout)["scores"].items()}
    assert scores["tethys"] > 0.9 > 0.5 > scores["kmer"]
    from pipelines.genomics.answers import answer, load_classifier

    found = load_classifier(output)
    assert isinstance(found, PretrainedClassifier)
    assert answer(found, [genome[8000:8030], "A" * 30])["prediction"][0] == "genome"
    refused = runner.invoke(app, [*arguments, "--pretrained", str(output)])
    assert isinstance(refused.exception, UserError) and "holds no DNA language model" in str(refused.exception)
