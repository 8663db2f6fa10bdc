from collections.abc import Iterator

import pytest
from gradus_command import Gradus


@pytest.fixture
def gradus(tmp_path) -> Iterator[Gradus]:
    command = Gradus(tmp_path)
    yield command
    command.stop_all()
