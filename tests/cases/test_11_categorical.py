from connectors import tables
from pipelines.forecasting.validation import Vocabulary


def test_codes_with_leading_zeros_stay_text(case):
    frame = tables.read(case / "train.csv")
    assert sorted(frame["zip"].unique().to_list()) == ["00123", "00124", "123"]


def test_missing_is_a_level_and_an_unseen_one_maps_to_unknown_once(case):
    frame, new = tables.read(case / "train.csv"), tables.read(case / "predict_new_id.csv")
    words = Vocabulary.of(frame["store"])
    codes, unknown = words.encode(frame["store"])
    assert unknown == () and {c for c, id in zip(codes, frame["unique_id"], strict=True) if id == "c"} == {1}
    codes, unknown = words.encode(new["store"])
    assert set(codes) == {0} and unknown == ("east",)
    shuffled = frame.sample(frame.height, shuffle=True, seed=3)
    assert Vocabulary.of(shuffled["store"]) == words == Vocabulary.from_json(words.to_json())
