"""Fixtures of the text layer's tests."""

import pytest

from coordinator.text.tokenizer import Tokenizer, load_tokenizer
from stagemesh.model_spec import ModelSpec, load_model_spec


@pytest.fixture(scope="session")
def sample_spec() -> ModelSpec:
    return load_model_spec("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def sample_tokenizer(sample_spec: ModelSpec) -> Tokenizer:
    return load_tokenizer(sample_spec)
