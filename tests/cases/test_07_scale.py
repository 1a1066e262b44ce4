import numpy as np

from connectors import tables
from tests.cases import forecasting


def test_constant_huge_tiny_and_negative_series(case, tmp_path):
    frame = tables.read(case / "train.csv")
    out, failed = forecasting.forecast(frame, forecasting.model(tmp_path, frame, look_back=24))
    assert failed.height == 0 and out["unique_id"].n_unique() == 6
    levels = forecasting.quantiles(out)
    assert np.isfinite(levels).all() and (np.diff(levels, axis=1) >= 0).all(), "no width is negative"
    point = {name: part["mean"].to_numpy() for (name,), part in out.group_by("unique_id")}
    assert np.abs(point["const0"]).max() < 1e-6
    assert np.abs(point["const_1e9"] / 1e9 - 1).max() < 1e-6
    last = {name: part["y"].to_numpy()[-24:-12] for (name,), part in frame.group_by("unique_id", maintain_order=True)}
    assert np.abs(point["big_offset"] - last["big_offset"]).mean() < 1.5, "the season goes on, an offset of 1e9 away"
    assert np.abs(point["tiny"] - last["tiny"]).mean() / np.abs(last["tiny"]).mean() < 0.5
    assert (point["neg"] < 0).all()
