# A machine for development on CPU: docker build -t backstash . && docker run --rm -it -v "$PWD":/src backstash make test
FROM python:3.11-slim-bookworm

RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git make \
    && rm -rf /var/lib/apt/lists/*

# The environment lies outside the working tree, so that it survives when the tree is mounted over /src.
ENV VENV=/opt/backstash
WORKDIR /src
COPY constraints.txt ./
# A plain `pip install torch` on Linux brings CUDA; TORCH_INDEX may name an index that has builds for CPU alone.
ARG TORCH_INDEX=""
RUN python -m venv $VENV \
    && $VENV/bin/pip install --no-cache-dir setuptools wheel \
    && $VENV/bin/pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
    && $VENV/bin/pip install --no-cache-dir -c constraints.txt numpy \
    && touch $VENV/.torch
COPY . .
RUN make VENV=$VENV $VENV/.dev
CMD ["make", "test"]
