# Headrace on a CPU, without root, on a file system that may be read-only:
#
#   docker build -t headrace --build-arg TORCH_INDEX=… .      (the index with torch's CPU builds; without it pip's own)
#   docker run --rm --read-only --tmpfs /tmp -v headrace:/var/cache/headrace headrace generate smollm2 -p "Once upon"
#
# Models and packed weights go to the volume. Kernels are compiled here for every instruction tier, so that the image
# holds no compiler and starts on any x86 processor.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /usr/local/headrace
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE .gitignore ./
ARG TORCH_INDEX=
RUN /usr/local/headrace/bin/python -m pip install -c constraints.txt ${TORCH_INDEX:+--index-url=$TORCH_INDEX} torch
COPY core core
COPY backends backends
COPY models models
COPY executors executors
COPY plugins plugins
COPY src src
RUN /usr/local/headrace/bin/python -m pip install -c constraints.txt .
RUN /usr/local/headrace/bin/headrace kernels build --tier all --output /usr/local/headrace/kernels

FROM python:${PYTHON}-slim
RUN useradd --system --uid 10001 --home-dir /var/cache/headrace headrace \
    && mkdir -p /var/cache/headrace \
    && chown headrace /var/cache/headrace
COPY --from=build /usr/local/headrace /usr/local/headrace
ENV PATH=/usr/local/headrace/bin:$PATH \
    HOME=/var/cache/headrace \
    HEADRACE_CACHE=/var/cache/headrace \
    HEADRACE_KERNELS=/usr/local/headrace/kernels \
    PYTHONDONTWRITEBYTECODE=1
USER 10001
VOLUME /var/cache/headrace
ENTRYPOINT ["headrace"]
CMD ["doctor"]
