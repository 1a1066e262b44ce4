"""From nothing to production: train, register, promote, serve, push, kill -9, promote live, roll back. No event lost, none learnt twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connectors.errors import UserError
from pipelines import tracking
from pipelines.forecasting import job
from tests.pipelines.serving.conftest import HORIZON, World
from tests.pipelines.serving.served import Client, Served, environment


def tethys(*words: str) -> tuple[int, Any]:
    done = subprocess.run([sys.executable, "-m", "pipelines.cli", *words, "--json"], capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def wait_for(client: Client, version: int, served: Served) -> None:
    deadline = time.monotonic() + 90
    while (about := client.get("/v1/service"))["version"] != version:
        assert time.monotonic() < deadline and about["trouble"] is None, (about, served.log.read_text())
        time.sleep(0.1)


class Pusher(threading.Thread):
    """Pushes rows one after another until it is told to stop or the service is gone; `acknowledged`: how many were answered."""

    def __init__(self, served: Served, events: list[dict[str, Any]]):
        super().__init__(daemon=True)
        self.client, self.events, self.acknowledged, self.enough = served.client(), events, 0, threading.Event()
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            while not self.enough.is_set() and self.acknowledged < len(self.events):
                self.client.push(self.events[self.acknowledged])
                self.acknowledged += 1
                time.sleep(0.01)
        except Exception as error:
            self.failure = error

    def end(self) -> int:
        self.enough.set()
        self.join(60)
        return self.acknowledged


def assert_memories_hold(world: World, client: Client, version: int, rows: int) -> None:
    """Exactly the first `rows` live rows were learnt, once each, in order; and the memories forecast what a table of them would."""
    for name in ("site-0", "site-1"):
        mine = [e for e in world.events(0, rows) if e["unique_id"] == name]
        learnt = client.rows(name)
        assert [(row["ds"], row["y"]) for row in learnt] == [(e["ds"].replace("+00:00", "Z"), e["y"]) for e in mine]
    for name, medians in world.expected(version, rows).items():
        answer = client.get(f"/v1/streams/{name}/forecast")
        assert answer["model"] == f"load/{version}"
        np.testing.assert_allclose(answer["quantiles"]["0.5"], medians, rtol=1e-4)


def test_from_nothing_to_production(world: World, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/own.db"
    for look_back in (4, 48):
        job.train(world.past, horizon=HORIZON, look_back=look_back, tracking_uri=store, model_name="load", output=tmp_path / "t", epochs=1)
        if look_back == 4:
            with pytest.raises(UserError, match="has no 'champion': tethys models promote load"):
                from pipelines.serving.service import Service, Settings

                Service(Settings(model="load", tracking_uri=store, state=tmp_path / "early"))
            code, first = tethys("models", "promote", "load", "--data", world.later, "--tracking-uri", store, "--gate", world.gate)
            assert code == 0 and first["champion"] == 1 and first["comparison"]["champion"] == "seasonal_naive"
    assert tracking.find_version("load", "challenger", store).number == 2
    own = World(world.folder, store, world.past, world.later, world.gate, world.live)
    state = tmp_path / "state"

    with Served(state, store) as served:
        client = served.client()
        origins, medians = [], []
        for event in own.events(0, 100):
            answer = client.push(event)
            assert answer["verdicts"] == ["accepted"] and answer["durable"] is True
            (forecast,) = answer["forecasts"]
            if event["unique_id"] == "site-0":
                origins.append(forecast["origin"])
                medians.append(forecast["quantiles"]["0.5"][0])
        assert origins == sorted(set(origins)) and len(set(medians)) > 45, "the forecast moves with every row"
        assert_memories_hold(own, client, 1, 100)

        pusher = Pusher(served, own.events(100, 400))
        pusher.start()
        while pusher.acknowledged < 60:
            time.sleep(0.005)
        served.kill()
        acknowledged = 100 + pusher.end()
        assert pusher.failure is not None, "killed too late to show anything"

    with Served(state, store) as served:
        client = served.client()
        learnt = sum(len(client.rows(name)) for name in ("site-0", "site-1"))
        assert acknowledged <= learnt <= acknowledged + 1, "what was answered is there, and at most the one in flight beside it"
        # The client that got no answer sends again: a repeat is recognised.
        again = client.push(*own.events(acknowledged, acknowledged + 1))
        assert again["verdicts"] == (["duplicate"] if learnt > acknowledged else ["accepted"])
        assert_memories_hold(own, client, 1, acknowledged + 1)

        pusher = Pusher(served, own.events(acknowledged + 1, 900))
        pusher.start()
        code, second = tethys("models", "promote", "load", "--data", world.later, "--tracking-uri", store, "--gate", world.gate, "--by", "ana")
        assert code == 0 and second["before"] == 1 and second["comparison"]["ratio"] < 1
        wait_for(client, 2, served)
        rows = acknowledged + 1 + pusher.end()
        assert pusher.failure is None, "no push failed while the versions changed places"
        client.push(*own.events(rows, rows + 20))
        rows += 20
        assert_memories_hold(own, client, 2, rows)
        models = [row["model"] for row in client.rows("site-0")]
        assert models[0] == "load/1" and models[-1] == "load/2" and models == sorted(models)

        assert tethys("models", "rollback", "load", "--tracking-uri", store)[1]["champion"] == 1
        wait_for(client, 1, served)
        assert_memories_hold(own, client, 1, rows)
        client.push(*own.events(rows, rows + 10))
        reigns = client.get("/v1/service")["champions"]
        assert [reign["version"] for reign in reigns] == [1, 2, 1] and "by ana" in reigns[1]["why"] and "rollback" in reigns[2]["why"]
        assert served.stop() == 0, "drained"

    os.rename(tmp_path / "own.db", tmp_path / "away.db")
    with Served(state, store) as served:  # the registry is away: what is live needs it not
        client = served.client()
        os.rename(tmp_path / "away.db", tmp_path / "own.db")
        assert_memories_hold(own, client, 1, rows + 10)


def test_a_challenger_runs_in_the_shadow_in_a_process_of_its_own(world: World, tmp_path: Path) -> None:
    with Served(tmp_path / "state", world.store, "--shadow", "challenger") as served:
        client = served.client()
        client.push(*world.events(0, 200))
        deadline = time.monotonic() + 90
        sent = 200
        while True:
            client.push(*world.events(sent, sent + 2))
            sent += 2
            tally = client.get("/v1/service")["shadow"]
            if tally is not None and tally["rows"] >= 40:
                break
            assert time.monotonic() < deadline and sent < 940, served.log.read_text()
            time.sleep(0.02)
        assert tally["model"] == "load/2" and tally["error"] < tally["live_error"], "the better version shows on the same rows"
        assert client.get("/v1/service")["version"] == 1, "a shadow decides nothing"
        data = client.raw("GET", "/v1/streams/site-0/memory")[1]
        status, _, _ = client.raw("PUT", "/v1/streams/site-0/memory", data, **{"Content-Type": "application/octet-stream"})
        assert status == 200
        # Its past is another one now: the shadow forgets what it read of it.
        client.push(*world.events(sent, sent + 2))
        deadline = time.monotonic() + 60
        while (tally := client.get("/v1/service")["shadow"]) is None or tally["behind"]:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert served.stop() == 0
