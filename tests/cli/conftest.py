from collections.abc import Iterator

import pytest
from gradus_command import Gradus


@pytest.fixture(scope="module")
def gradus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gradus]:
    command = Gradus(tmp_path_factory.mktemp("gradus"))
    yield command
    command.stop_all()
