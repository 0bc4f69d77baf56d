"""What holds for all tests."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_watching_thread() -> None:
    """transformers' progress bars start a thread that watches them and never ends: processes that later tests start
    would then be spawned, and not know what a test put in a module's place."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return
    tqdm.monitor_interval = 0
