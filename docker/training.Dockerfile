# syntax=docker/dockerfile:1
# Base of training images: Python, torch and the Pollux agent; drivers can run it as well. Put your code on top:
#   FROM pollux-training:0.1.0
#   COPY train.py /workspace/train.py
# From the project's top folder: docker build -f docker/training.Dockerfile -t pollux-training:0.1.0 .

FROM debian:12.12-slim AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# Debian keeps only the newest build of a version, so pins would break; the base image's tag pins the release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt ./
COPY agent agent
# scikit-learn has the data of the examples.
RUN python3 -m venv /opt/pollux \
    && /opt/pollux/bin/pip install --no-cache-dir --constraint constraints.txt './agent[kubernetes,torch]' scikit-learn \
    && /opt/pollux/bin/pip check \
    && /opt/pollux/bin/pip list --format freeze > /opt/pollux/packages.txt

FROM debian:12.12-slim
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="pollux-training" \
      org.opencontainers.image.description="Base of PyTorch training images whose jobs change their GPUs" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="docker.io/library/debian:12.12-slim" \
      dev.pollux.sbom.packages="/opt/pollux/packages.txt"
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates libgomp1 python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 50000 --gid 0 --home-dir /workspace --create-home --shell /usr/sbin/nologin trainer
COPY --from=build /opt/pollux /opt/pollux
COPY agent/examples /opt/pollux/examples
# The root file system may be read-only: what is written, torch.compile's cache included, goes to /tmp.
ENV PATH=/opt/pollux/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    XDG_CACHE_HOME=/tmp/cache \
    TORCHINDUCTOR_CACHE_DIR=/tmp/torchinductor \
    TRITON_CACHE_DIR=/tmp/triton \
    MPLCONFIGDIR=/tmp/matplotlib \
    MLFLOW_DISABLE_TELEMETRY=true \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
VOLUME ["/tmp"]
WORKDIR /workspace
USER 50000:0
# A batch job has no port to ask: its driver watches the pod.
HEALTHCHECK NONE
CMD ["pollux-agent", "--help"]
