"""The row in place against the pure pair, on streams that begin, miss rows and stand at different times."""

import math

import pytest
import torch

from kernels.native import streams
from titans_core.forecaster import HOURLY, Forecaster, ForecasterConfig
from titans_core.forecaster_row import ForecasterRow, unsupported
from titans_core.patches import PatchConfig
from titans_core.state import leaves, select, write_

pytestmark = pytest.mark.skipif(bool(streams.supports()), reason=f"native kernels: {streams.supports()}")


def forecaster(hidden: int = 8) -> Forecaster:
    torch.manual_seed(0)
    made = Forecaster(ForecasterConfig(look_back=12, horizon=6, hidden=hidden, seasons=HOURLY))
    for name in ("line", "feature_mean", "offsets"):
        getattr(made, name).copy_(torch.randn_like(getattr(made, name)) * 0.1)
    if made.net is not None:
        made.net[-1].weight.data.normal_(std=0.1)  # type: ignore[operator,union-attr]
    return made


@torch.inference_mode()
def test_a_row_in_place_is_observe_and_forecast() -> None:
    model, streams_, horizon = forecaster(), 20, 6
    row, pure, state = ForecasterRow(model), model.initial_state(streams_), model.initial_state(streams_)
    cycles = torch.tensor([season.slots for season in HOURLY])
    for turn in range(60):
        slots = torch.randperm(streams_)[: int(torch.randint(1, streams_, ()))]
        observed = torch.rand(len(slots)) > 0.2
        y = torch.where(observed, 1e6 + 10 * torch.randn(len(slots), dtype=torch.float64), 0.0)
        if turn < 3:
            y[:] = 5.0  # constant as yet
        times = torch.tensor([turn, turn + 30])
        which = torch.randint(2, (len(slots),))
        now = (times.unsqueeze(1) % cycles).float()
        ahead = ((times.view(-1, 1, 1) + torch.arange(1, horizon + 1).view(1, -1, 1)) % cycles).float()
        found = row(state, slots, y, observed, which, now, ahead)
        part = model.observe(select(pure, slots), y.unsqueeze(1), observed.unsqueeze(1), now[which].unsqueeze(1))
        write_(pure, slots, part)
        torch.testing.assert_close(found, model.forecast(part, ahead[which]), rtol=1e-6, atol=1e-4, equal_nan=True)
        for (name, a), (_, b) in zip(leaves(state), leaves(pure), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@torch.inference_mode()
def test_a_stream_does_not_depend_on_its_company() -> None:
    model = forecaster()
    row, together, alone = ForecasterRow(model), model.initial_state(5), model.initial_state(5)
    now, ahead = torch.zeros(1, 3), torch.zeros(1, 6, 3)
    for _ in range(20):
        y = torch.randn(5, dtype=torch.float64)
        row(together, torch.arange(5), y, torch.ones(5, dtype=torch.bool), torch.zeros(5, dtype=torch.long), now, ahead)
        for n in range(5):
            row(alone, torch.tensor([n]), y[n : n + 1], torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.long), now, ahead)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(leaves(together), leaves(alone), strict=True))


@torch.inference_mode()
@pytest.mark.parametrize("hidden", [0, 8])
def test_a_history_in_place_is_observe_and_what_is_ahead_of_it_is_expected_and_forecast(hidden: int) -> None:
    """Longer and shorter than the look-back, in any split, and the same bits whoever shares the call."""
    model = forecaster(hidden)
    row, n, horizon = ForecasterRow(model), 7, 6
    cycles = torch.tensor([season.slots for season in HOURLY])
    state, pure, alone = model.initial_state(n), model.initial_state(n), [model.initial_state(1) for _ in range(n)]
    at = 0
    for rows in (3, 30, 1, 12, 0, 47):
        times = torch.arange(at, at + rows + horizon).unsqueeze(1) + torch.tensor([0, 5])  # two runs of times
        slots = (times.T.unsqueeze(2) % cycles).float()
        which = torch.arange(n) % 2
        observed = torch.rand(n, rows) > 0.2
        observed[0] = False
        y = torch.where(observed, 1e6 + 10 * torch.randn(n, rows, dtype=torch.float64), torch.nan)
        now, ahead = slots[:, :rows].contiguous(), slots[:, rows:].contiguous()
        row.observe(state, y, observed, now, which)
        pure = model.observe(pure, y, observed, now[which])
        for i in range(n):
            row.observe(alone[i], y[i : i + 1], observed[i : i + 1], now, which[i : i + 1])
        for (name, a), (_, b) in zip(leaves(state), leaves(pure), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
        mean, quantiles = row.ahead(state, ahead, which)
        torch.testing.assert_close(mean, model.expected(pure, ahead[which]), rtol=1e-6, atol=1e-4, equal_nan=True)
        torch.testing.assert_close(quantiles, model.forecast(pure, ahead[which]), rtol=1e-6, atol=1e-4, equal_nan=True)
        assert mean[0].isnan().all() and quantiles[0].isnan().all() and mean[1:].isfinite().all()
        for i in range(n):
            assert all(torch.equal(a, b[i : i + 1]) for (_, a), (_, b) in zip(leaves(alone[i]), leaves(state), strict=True))
            apart = row.ahead(alone[i], ahead, which[i : i + 1])
            assert torch.equal(apart[0].nan_to_num(7.0)[0], mean.nan_to_num(7.0)[i])
            assert torch.equal(apart[1].nan_to_num(7.0)[0], quantiles.nan_to_num(7.0)[i])
        at += rows


@torch.inference_mode()
def test_a_history_that_does_not_fit_is_refused() -> None:
    model = forecaster()
    row, state = ForecasterRow(model), model.initial_state(2)
    y, seen, which = torch.zeros(2, 3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, dtype=torch.long)
    phase = torch.zeros(1, 3, 3)
    for wrong, message in (
        ((y[:1], seen[:1], phase, which), "y has size 1"),
        ((y.float(), seen, phase, which), "y has the wrong dtype"),
        ((y, seen, torch.full_like(phase, 24.0), which), "slot 24"),
        ((y, seen, torch.full_like(phase, math.nan), which), "slot"),
        ((y, seen, phase[:, :2], which), "phase"),
        ((y, seen, phase, which + 1), "which must lie"),
    ):
        with pytest.raises(RuntimeError, match=message):
            row.observe(state, *wrong)
    with pytest.raises(RuntimeError, match="slot 24"):
        row.ahead(state, torch.full((1, 6, 3), 24.0), which)


def test_what_it_does_not_take_is_said() -> None:
    other = Forecaster(ForecasterConfig(look_back=16, horizon=2, hidden=0, patches=PatchConfig()))
    assert "without blocks" in unsupported(other)
    with pytest.raises(ValueError, match="without blocks"):
        ForecasterRow(other)
    row, state = ForecasterRow(forecaster()), forecaster().initial_state(2)
    y, seen = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.bool)
    place, now, ahead = torch.zeros(1, dtype=torch.long), torch.zeros(1, 3), torch.zeros(1, 6, 3)
    for stream, slot, message in ((2, 0.0, "slots must lie"), (0, 24.0, "slot 24"), (0, math.nan, "slot")):
        with pytest.raises(RuntimeError, match=message):
            row(state, torch.tensor([stream]), y, seen, place, torch.full_like(now, slot), ahead)
