from connectors import tables
from pipelines.forecasting.validation import validate
from tests.cases import forecasting


def test_the_order_of_the_rows_changes_no_forecast(case, tmp_path):
    shuffled, ordered = tables.read(case / "shuffled.csv"), tables.read(case / "sorted.csv")
    before = shuffled.clone()
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    a, _ = forecasting.forecast(shuffled, forecasting.model(tmp_path / "a", shuffled, look_back=24))
    b, _ = forecasting.forecast(ordered, forecasting.model(tmp_path / "b", ordered, look_back=24))
    assert a.equals(b) and a.height == 24
    assert a.select("unique_id", "ds").equals(a.select("unique_id", "ds").sort("unique_id", "ds"))
    assert shuffled.equals(before), "the caller's frame stays as it was"
    assert validate(shuffled).of_kind("unsorted").level == "note" and validate(ordered).findings == ()
