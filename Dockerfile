# embershard in a container: one image for the CPU, one for NVIDIA GPUs.
#
#   docker build --target cpu -t embershard:0.1-cpu .
#   docker build --target cuda -t embershard:0.1 .
#   docker run --rm --gpus all --shm-size 8g -v "$PWD:/work" embershard:0.1 train quickstart
#
# On a GPU machine NVIDIA's driver and container toolkit must be installed; CUDA's libraries come with torch. Versions are
# those of requirements.txt; torch, torchrec and FBGEMM belong together, and docs/installation.md has the tested sets (a
# test compares them).

FROM python:3.11-slim AS wheel
WORKDIR /source
COPY pyproject.toml setup.cfg README.md LICENSE ./
COPY embershard embershard
COPY examples examples
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim AS base
RUN useradd --create-home --uid 1000 embershard && install -d -o embershard /opt/embershard /work
USER embershard
ENV PATH=/opt/embershard/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
RUN python -m venv /opt/embershard
COPY requirements.txt /tmp/requirements.txt
COPY --from=wheel /wheels /tmp/wheels
WORKDIR /work
ENTRYPOINT ["embershard"]

# torchrec comes without its dependencies: they would put the CUDA build of FBGEMM over the CPU build. The last command
# compiles the caches' loops for this machine's kind of CPU.
FROM base AS cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH=2.13.0
ARG TORCHREC=1.8.0
ARG FBGEMM=1.8.0
RUN pip install --index-url "$TORCH_INDEX" torch==$TORCH
RUN sed "s/^torch==.*/torch==$TORCH/" /tmp/requirements.txt | pip install -r /dev/stdin
RUN pip install --no-deps fbgemm-gpu-cpu==$FBGEMM torchrec==$TORCHREC /tmp/wheels/*.whl
RUN embershard --version && python -c "import embershard.cache.loops"

# Triton compiles its link to the driver with the first kernel that it launches: in every new container.
FROM base AS cuda
USER root
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
USER embershard
ARG TORCH=2.13.0
ARG TORCHREC=1.8.0
ARG FBGEMM=1.8.0
RUN sed "s/^torch==.*/torch==$TORCH/" /tmp/requirements.txt | pip install -r /dev/stdin
RUN pip install --no-deps fbgemm-gpu==$FBGEMM torchrec==$TORCHREC /tmp/wheels/*.whl
RUN embershard --version && python -c "import embershard.cache.loops"
