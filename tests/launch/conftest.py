"""The small data set and model of the train room's tests."""

from tests.train.conftest import materials

__all__ = ["materials"]
