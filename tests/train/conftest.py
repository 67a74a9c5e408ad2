"""One small data set and model for all tests of this room."""

from __future__ import annotations

import pytest

from tests.train.tiny import Materials, make_materials


@pytest.fixture(scope="session")
def materials(tmp_path_factory) -> Materials:
    return make_materials(tmp_path_factory.mktemp("materials"))
