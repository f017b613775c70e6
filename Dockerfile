# Snakemake with the workflow, and `lockstep serve`: every package of envs/requirements.txt, envs/kubernetes.txt and envs/openvino.txt.
#
#   docker build --tag lockstep:0.3.0 .
#   docker build --tag lockstep:0.3.0 --build-arg TORCH=torch==2.13.0+cpu --build-arg PIP_EXTRA_INDEX_URL=... .
#   docker build --tag lockstep-cuda:0.3.0 --target cuda .      # the same, and what the backend `cuda` runs with, from wheels
#
# docs/clusters.md says how to run it; docs/install.md which build of PyTorch to take.
ARG BASE=docker.io/library/python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

FROM ${BASE} AS builder
# pip reads these; they are in no layer of the images below.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
# A build of PyTorch other than pip's own choice, as of the Makefile.
ARG TORCH
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_INPUT=1
WORKDIR /opt/lockstep
RUN python -m venv /opt/venv
# First what seldom changes. There is no compiler here: all that is native comes as a wheel.
COPY envs/requirements.txt envs/hashes.txt envs/openvino.txt envs/kubernetes.txt envs/
RUN /opt/venv/bin/python -m pip install --no-deps --require-hashes \
        -r envs/hashes.txt -r envs/openvino.txt -r envs/kubernetes.txt \
    && /opt/venv/bin/python -m pip install ${TORCH} -r envs/requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN /opt/venv/bin/python -m pip install --no-deps --no-build-isolation --editable .

FROM builder AS cuda-builder
COPY envs/cuda.txt envs/
RUN /opt/venv/bin/python -m pip install --no-deps --require-hashes -r envs/cuda.txt

FROM ${BASE} AS runtime
RUN groupadd --gid 10001 lockstep \
    && useradd --uid 10001 --gid 10001 --create-home lockstep \
    && install --directory --owner 10001 --group 10001 /lockstep
# The files that .dockerignore lets through: a record names the pins and the code of a checkout.
COPY . /opt/lockstep
# USER for a user whose number the image does not know (docker run --user): Python asks for a name.
ENV PATH=/opt/venv/bin:${PATH} \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    USER=lockstep
# By number, so that Kubernetes can see that it is not root.
USER 10001:10001
# Results go below the working directory: mount a volume there.
WORKDIR /lockstep
EXPOSE 8000
CMD ["lockstep", "--help"]

FROM runtime AS cuda
# NVIDIA's container runtime mounts the driver.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=cuda-builder /opt/venv /opt/venv

FROM runtime AS cpu
COPY --from=builder /opt/venv /opt/venv
