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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``@pytest.mark.sample(n)``: of a function's cases that are not slow by themselves, n spread evenly stay in
    `make test`; the others are part of `make test-all` only."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for found in cases.values():
        number = found[0].get_closest_marker("sample").args[0]
        kept = {index * len(found) // number for index in range(number)}
        for index, item in enumerate(found):
            if index not in kept:
                item.add_marker(pytest.mark.slow)
