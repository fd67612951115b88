"""Real models, where `benchmarks/models.py fetch` has put them."""
import models
import pytest


@pytest.mark.network
@pytest.mark.expensive
@pytest.mark.parametrize("name", models.MODELS)
def test_tokens_and_greedy_text_are_those_of_transformers(name):
    pytest.importorskip("accelerate")
    file = models.CACHE / f"{name}.gguf"
    if not file.exists():
        pytest.skip(f"benchmarks/models.py fetch {name}")
    assert models.check(file) == 0
