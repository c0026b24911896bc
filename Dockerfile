# The worker in a container: unprivileged, without a compiler, pip or any secret.
#   scripts/image, or docker build --tag briter-worker .
# The user's id should be that of the site's files: --build-arg WORKER_UID=$(id -u)

# Pinned by its digest, that of the index for all processors. Debian's packages are the newest of its release.
ARG PYTHON=3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d
FROM python:${PYTHON} AS build
WORKDIR /build
COPY constraints.txt ./
RUN pip install --no-cache-dir --disable-pip-version-check --constraint constraints.txt hatchling
RUN python -m venv --without-pip /opt/briter-worker
COPY pyproject.toml README.md LICENSE ./
COPY briter_worker ./briter_worker
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir wheels . \
 && pip --python /opt/briter-worker/bin/python install --no-cache-dir --disable-pip-version-check \
    --constraint constraints.txt "$(echo wheels/*.whl)[metrics,postgres,web,webhooks]"

FROM python:${PYTHON}
LABEL org.opencontainers.image.title="Briter Worker" \
      org.opencontainers.image.description="Publishes each save of a flat-file CMS as one commit on the git remote" \
      org.opencontainers.image.licenses="MIT"
RUN apt-get update \
 && apt-get install --yes --no-install-recommends git git-lfs openssh-client tini \
 && rm -rf /var/lib/apt/lists/* \
 && git lfs install --system --skip-repo

ARG WORKER_UID=10001
ARG WORKER_GID=10001
# ssh insists on a user with a name and a home; --non-unique, as that id may be taken.
# /storage is the worker's, also where nothing of the host's is mounted there: a cluster's workers need no more.
# The mounted site may belong to another user: without safe.directory, git calls that dubious ownership.
# The deploy key and the remote's host key come as secrets; an unknown host is never trusted.
RUN groupadd --non-unique --gid "$WORKER_GID" worker \
 && useradd --non-unique --uid "$WORKER_UID" --gid "$WORKER_GID" --create-home worker \
 && install -d -o "$WORKER_UID" -g "$WORKER_GID" /storage \
 && git config --system --add safe.directory /site \
 && printf '%s\n' 'Host *' \
    '  IdentityFile /run/secrets/deploy_key' \
    '  GlobalKnownHostsFile /run/secrets/known_hosts /etc/ssh/ssh_known_hosts' \
    '  StrictHostKeyChecking yes' >/etc/ssh/ssh_config.d/briter-worker.conf

COPY --from=build /opt/briter-worker /opt/briter-worker
ENV PATH=/opt/briter-worker/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    BRITER_APP_ROOT=/site \
    BRITER_STORAGE_ROOT=/storage
WORKDIR /site
USER worker

STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=10s --start-period=15s --retries=3 CMD ["briter-worker", "health"]
ENTRYPOINT ["tini", "--", "briter-worker"]
CMD ["run"]
