"""Eight tasks of GUE (Zhou et al. 2023, DNABERT-2) with their official splits: k-mer regression, a small CNN, Tethys.

    python benchmarks/gue.py [--tasks mouse_0 tf_4] [--seeds 3] [--runs runs/gue]

One command runs the three models side by side, on train alone, chosen on dev (dev rows of tf/4 that are in train are
dropped first), scored once on test. figures.TASK.MODEL.{mcc,lo,hi}: MCC x 100, mean over seeds, with the 95 % interval of
resampled test rows. Nothing is pretrained. Whether a task reads one strand or both is a fact of its biology and fixed
here: proteins bind either strand, promoters have one. Each run is kept under --runs, so that a broken-off benchmark goes
on where it stopped; delete the folder to start afresh.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from sklearn.metrics import matthews_corrcoef  # noqa: E402

from benchmarks import report  # noqa: E402
from pipelines.genomics.baselines import KmerRegression, SmallCnn, fit_kmer_regression  # noqa: E402
from pipelines.genomics.datasets import Labelled, read_labelled  # noqa: E402
from pipelines.genomics.training import (  # noqa: E402
    Rows,
    Settings,
    describe,
    fit_length,
    predict,
    train_classifier,
    train_network,
)
from titans_core.classifier import ClassifierConfig  # noqa: E402

TASKS = {
    "mouse_0": ("mouse/0", "both"),
    "mouse_2": ("mouse/2", "both"),
    "mouse_4": ("mouse/4", "both"),
    "tf_0": ("tf/0", "both"),
    "tf_2": ("tf/2", "both"),
    "tf_4": ("tf/4", "both"),
    "prom_core_tata": ("prom/prom_core_tata", "forward"),
    "prom_300_tata": ("prom/prom_300_tata", "forward"),
}
# Published MCC x 100 (DNABERT-2, 117 M parameters) and the best of k-mer regression and two CNNs measured before.
DNABERT2 = {
    "mouse_0": 56.8,
    "mouse_2": 79.3,
    "mouse_4": 52.7,
    "tf_0": 72.0,
    "tf_2": 66.5,
    "tf_4": 77.4,
    "prom_core_tata": 74.2,
    "prom_300_tata": 71.6,
}
SIMPLE = {
    "mouse_0": 60.4,
    "mouse_2": 79.3,
    "mouse_4": 41.7,
    "tf_0": 64.2,
    "tf_2": 67.6,
    "tf_4": 76.2,
    "prom_core_tata": 73.0,
    "prom_300_tata": 74.8,
}


def load(folder: Path) -> tuple[dict[str, Rows], int]:
    """Encoded splits of a task and its sequence length; dev rows that are in train are left out."""
    splits = {name: read_labelled(folder / f"{name}.csv.gz") for name in ("train", "dev", "test")}
    known = set(splits["train"].sequences)
    splits["dev"] = splits["dev"].take([i for i, s in enumerate(splits["dev"].sequences) if s not in known])
    length = max(map(len, splits["train"].sequences))

    def rows(split: Labelled) -> Rows:
        return fit_length(split.sequences, length).codes, np.array([int(label) for label in split.labels], np.int64)

    return {name: rows(split) for name, split in splits.items()}, length


def budget(count: int, length: int, seed: int) -> Settings:
    """Row passes by the number of rows and their length: the same rule for every task and for both networks."""
    passes = min(max(45_000 * min(1.0, 200 / length), 4 * count), 100_000)
    small = count < 7_000
    return Settings(row_passes=round(passes), batch=64 if small else 128, rate=2e-3 if small else 3e-3, seed=seed)


def run(model: str, splits: dict[str, Rows], length: int, strands: str, seed: int, kmer: KmerRegression) -> dict[str, Any]:
    """Test predictions of one model."""
    train, dev, test = splits["train"], splits["dev"], splits["test"]
    start, details = time.process_time(), {}
    if model == "kmer":
        test_probabilities, dev_probabilities = (kmer.probabilities(part[0]) for part in (test, dev))
        details = {"k": kmer.k, "strands": kmer.strands, "parameters": int(kmer.weight[1:].size + 1)}
    elif model == "cnn":
        torch.manual_seed(seed)
        network = SmallCnn(2, strands)
        train_network(network, network.network, train, budget(len(train[0]), length, seed), strands=strands)
        with torch.inference_mode():
            test_probabilities, dev_probabilities = (
                torch.cat([network(x).softmax(-1) for x in torch.from_numpy(part[0]).long().split(512)]).numpy() for part in (test, dev)
            )
        details = {"parameters": sum(p.numel() for p in network.parameters())}
    else:
        config = ClassifierConfig(classes=("0", "1"), length=length, strands=strands, kmer=kmer.k)  # type: ignore[arg-type]
        composition = kmer if kmer.strands == strands else None
        fitted = train_classifier(config, train, dev, budget(len(train[0]), length, seed), composition=composition)
        test_probabilities, dev_probabilities = (predict(fitted, part[0]) for part in (test, dev))
        details = describe(fitted)
    scores = {
        f"{name}_mcc": 100 * matthews_corrcoef(part[1], found.argmax(1))
        for name, part, found in (("dev", dev, dev_probabilities), ("test", test, test_probabilities))
    }
    seconds = round(time.process_time() - start, 1)
    return {"seconds": seconds, **scores, **details, "predicted": test_probabilities.argmax(1).tolist()}


def summarise(target: np.ndarray[Any, Any], runs: list[dict[str, Any]], draws: int = 1000) -> dict[str, float]:
    """Mean over seeds of the MCC x 100, and the 95 % interval of that mean over resampled test rows."""
    choose = np.random.default_rng(0)
    predicted = np.array([entry["predicted"] for entry in runs])
    drawn = []
    for _ in range(draws):
        rows = choose.integers(0, len(target), len(target))
        drawn.append(np.mean([_mcc(target[rows], each[rows]) for each in predicted]))
    low, high = 100 * np.quantile(drawn, (0.025, 0.975))
    mean = 100 * np.mean([_mcc(target, each) for each in predicted])
    return {"mcc": round(float(mean), 2), "lo": round(float(low), 2), "hi": round(float(high), 2)}


def _mcc(target: np.ndarray[Any, Any], predicted: np.ndarray[Any, Any]) -> float:
    return float(np.corrcoef(target, predicted)[0, 1]) if target.any() and predicted.any() and not predicted.all() else 0.0


def schedule(tasks: list[str], first: int, seeds: int) -> list[tuple[str, int, str]]:
    """Model, seed and task of every run; the k-mer regression once, because nothing in it is random."""
    networks = [(model, seed, task) for model in ("tethys", "cnn") for seed in range(first, first + seeds) for task in tasks]
    return [("kmer", first, task) for task in tasks] + networks


def main() -> None:
    parser = report.arguments(__doc__.split("\n")[0], data="folder of the tasks, TASK/{train,dev,test}.csv.gz")
    parser.set_defaults(data=ROOT / "../shared/data/sequences/gue")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="tasks to run")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the networks, from --seed on")
    parser.add_argument("--runs", type=Path, default=Path("runs/gue"), help="folder of the single runs")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.runs.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, list[dict[str, Any]]]] = {task: {} for task in options.tasks}
    targets, kmers = {}, {}
    for model, seed, task in schedule(options.tasks, options.seed, options.seeds):
        folder, strands = TASKS[task]
        splits, length = load(options.data / folder)
        targets[task] = splits["test"][1]
        file = options.runs / f"{task}.{model}.{seed}.json"
        if not file.exists():
            started = time.process_time()
            if task not in kmers:
                choices = ("forward", "both") if strands == "both" else ("forward",)
                strengths = (1.0, 10.0, 100.0) if len(splits["train"][0]) <= 15_000 else (10.0,)
                kmers[task] = fit_kmer_regression(splits["train"], splits["dev"], 2, strands=choices, strengths=strengths)
            fitting = time.process_time() - started if model == "kmer" else 0.0
            result = run(model, splits, length, strands, seed, kmers[task])
            result["seconds"] = round(result["seconds"] + fitting, 1)
            part = file.with_suffix(".part")
            part.write_text(json.dumps(result))
            part.rename(file)
            shown = {key: value for key, value in result.items() if key != "predicted"}
            report.progress(json.dumps({"task": task, "model": model, "seed": seed, **shown}))
        found[task].setdefault(model, []).append(json.loads(file.read_text()))
    figures = {task: {model: summarise(targets[task], runs) for model, runs in models.items()} for task, models in found.items()}
    details = {
        task: {
            model: [{key: value for key, value in entry.items() if key != "predicted"} for entry in runs] for model, runs in models.items()
        }
        for task, models in found.items()
    }
    mine = {task: figures[task]["tethys"]["mcc"] for task in figures}
    bars = {
        "at_or_above_simple": sum(mine[t] >= max(SIMPLE[t], figures[t]["kmer"]["mcc"], figures[t]["cnn"]["mcc"]) for t in mine),
        "above_dnabert2": sum(mine[t] > DNABERT2[t] for t in mine),
        "tasks": len(mine),
    }
    report.finish("gue", {**figures, "bars": bars, "dnabert2": DNABERT2, "runs": details}, libraries=("torch", "scikit-learn"))


if __name__ == "__main__":
    main()
