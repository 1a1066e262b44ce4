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


def forecaster() -> Forecaster:
    torch.manual_seed(0)
    made = Forecaster(ForecasterConfig(look_back=12, horizon=6, hidden=8, seasons=HOURLY))
    for name in ("line", "feature_mean", "offsets"):
        getattr(made, name).copy_(torch.randn_like(getattr(made, name)) * 0.1)
    made.net[-1].weight.data.normal_(std=0.1)  # type: ignore[index,union-attr]
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
