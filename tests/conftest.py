"""Servers that tests share: started once, where a test first asks for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import servers


@pytest.fixture(scope="session")
def postgres() -> Iterator[servers.Postgres]:
    with servers.running(servers.Postgres) as server:
        yield server


@pytest.fixture(scope="session")
def object_store() -> Iterator[servers.ObjectStore]:
    with servers.running(servers.ObjectStore) as server:
        yield server
