# syntax=docker/dockerfile:1
# Airflow with Pollux: API server, scheduler, DAG processor, triggerer and executor pods; MLflow's server too.
# From the project's top folder: docker build -f docker/airflow.Dockerfile -t pollux-airflow:0.1.0 .

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
COPY plugins plugins
RUN python3 -m venv /opt/pollux \
    && /opt/pollux/bin/pip install --no-cache-dir --constraint constraints.txt './agent[kubernetes]' './plugins[postgres]' \
    && /opt/pollux/bin/pip check \
    && /opt/pollux/bin/pip list --format freeze > /opt/pollux/packages.txt

FROM debian:12.12-slim
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="pollux-airflow" \
      org.opencontainers.image.description="Airflow with goodput-optimal scheduling of PyTorch training" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="docker.io/library/debian:12.12-slim" \
      dev.pollux.sbom.packages="/opt/pollux/packages.txt"
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 tini tzdata \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 50000 --gid 0 --home-dir /opt/airflow --create-home --shell /usr/sbin/nologin airflow
COPY --from=build /opt/pollux /opt/pollux
COPY dags /opt/airflow/dags
# With a configuration file in place Airflow writes none, so the root file system may be read-only; settings come from
# the environment. What it does write lies in the volumes and in /tmp. Group 0 may write there, whatever the user's id.
RUN echo "# settings come from AIRFLOW__SECTION__OPTION variables" > /opt/airflow/airflow.cfg \
    && mkdir -p /opt/airflow/logs /opt/airflow/plugins /pollux/state \
    && chown -R airflow:0 /opt/airflow/logs /pollux \
    && chmod -R g+w /opt/airflow/logs /pollux
ENV PATH=/opt/pollux/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    AIRFLOW_HOME=/opt/airflow \
    AIRFLOW__CORE__LOAD_EXAMPLES=False \
    AIRFLOW__API__EXPOSE_STACKTRACE=False \
    POLLUX_STATE=/pollux/state \
    MLFLOW_DISABLE_TELEMETRY=true \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
VOLUME ["/opt/airflow/logs", "/pollux/state", "/tmp"]
WORKDIR /opt/airflow
USER 50000:0
EXPOSE 8080
# For the API server, which is the default command; other components override it.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/api/v2/monitor/health', timeout=8)"]
ENTRYPOINT ["/usr/bin/tini", "--"]
CMD ["airflow", "api-server"]
