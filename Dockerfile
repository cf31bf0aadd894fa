# An image with dynmo and what it needs. Its command is `dynmo`.
#   docker build --tag dynmo .                          for CPUs
#   docker build --tag dynmo --build-arg DEVICE=cuda .  for CUDA, with torch's build of PyPI
#   docker run --rm --volume "$PWD:/home/dynmo" dynmo train run.toml
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE}
ARG DEVICE=cpu
# Extras of pyproject.toml, such as "hf,data".
ARG EXTRAS=""
SHELL ["/bin/sh", "-euc"]
# Triton compiles its launchers with gcc.
# hadolint ignore=DL3008
RUN case "$DEVICE" in \
    cpu) ;; \
    cuda) \
        apt-get update; \
        apt-get install --yes --no-install-recommends gcc libc6-dev; \
        rm -rf /var/lib/apt/lists/* ;; \
    *) echo "DEVICE is cpu or cuda, not $DEVICE" >&2; exit 2 ;; \
    esac
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    if [ "$DEVICE" = cpu ]; then \
        export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu; \
    fi; \
    pip install --no-cache-dir --constraint /constraints.txt "$(echo /wheels/*.whl)${EXTRAS:+[$EXTRAS]}"
RUN useradd --uid 1000 --create-home dynmo
USER 1000
WORKDIR /home/dynmo
ENTRYPOINT ["dynmo"]
CMD ["--help"]
